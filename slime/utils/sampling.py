"""Sampling parameters of requests to the engines: limits of what is left, and seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any


def limited(params: Mapping[str, Any], left: int, made: int = 0) -> dict[str, Any]:
    """Return ``params`` for the rest of a response of which ``made`` tokens are there and ``left`` may follow.

    Both limits follow: engines refuse a ``min_new_tokens`` above ``max_new_tokens``.
    """
    found = {**params, "max_new_tokens": left}
    if found.get("min_new_tokens") is not None:
        found["min_new_tokens"] = max(0, min(int(found["min_new_tokens"]) - made, left))
    return found


def sampling_seed(*parts: object) -> int:
    """Return the seed, below 2^31, of a response that ``parts`` tell from all others: the same ones, the same seed."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
