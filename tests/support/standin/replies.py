"""Answers of stand-in engines and their durations, from a seed."""

from __future__ import annotations

import hashlib
import json
import math
import random
from typing import Any

FIRST_LENGTH_TOKEN = 1000
"""Tokens from here up say how long their response is to become; prompts use smaller ones."""


def hashed_reply(input_ids: list[int], params: dict[str, Any]) -> list[int]:
    """A reply that depends on the prompt only: 3 to 10 lower-case letters (as character codes)."""
    digest = hashlib.sha256(json.dumps(input_ids).encode()).digest()
    return [97 + byte % 26 for byte in digest[: 3 + digest[31] % 8]]


class FixedReply:
    """The same ``length`` tokens, whatever is asked."""

    def __init__(self, length: int) -> None:
        self.tokens = [97 + i % 26 for i in range(length)]

    def __call__(self, input_ids: list[int], params: dict[str, Any]) -> list[int]:
        return self.tokens


class LognormalTimes:
    """Seconds per request, lognormal with this ``mean`` (s) and ``sigma`` (of the logarithm)."""

    def __init__(self, mean: float, sigma: float, seed: int = 0) -> None:
        self.mu, self.sigma = math.log(mean) - sigma * sigma / 2, sigma
        self.random = random.Random(seed)

    def __call__(self, input_ids: list[int]) -> float:
        return self.random.lognormvariate(self.mu, self.sigma)


class LognormalLengths:
    """Replies whose lengths are lognormal with this ``median`` and 99th percentile, at most ``longest`` tokens.

    Every token says how long the whole response is to become, so that a request with the tokens of an aborted one gets
    the rest of the same response.
    """

    Z99 = 2.3263478740408408

    def __init__(self, median: float, p99: float, longest: int, seed: int = 0) -> None:
        self.mu, self.sigma = math.log(median), math.log(p99 / median) / self.Z99
        self.longest = longest
        self.random = random.Random(seed)

    def draw(self) -> int:
        return max(1, min(self.longest, round(self.random.lognormvariate(self.mu, self.sigma))))

    def __call__(self, input_ids: list[int], params: dict[str, Any]) -> list[int]:
        last = input_ids[-1]
        if last < FIRST_LENGTH_TOKEN:
            length = self.draw()
            return [FIRST_LENGTH_TOKEN + length] * length
        have = sum(token >= FIRST_LENGTH_TOKEN for token in input_ids)
        return [last] * (last - FIRST_LENGTH_TOKEN - have)
