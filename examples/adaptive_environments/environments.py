"""Sums of one turn, and a hunt for a number of several."""

from __future__ import annotations

import functools
import random
import re
from typing import Any

from examples.quickstart.make_data import LARGEST, question
from slime.rollout.environments import Environment, Step
from slime.rollout.rm_hub.answer_text import final_answer

HELD_OUT = 512
"""Sums of two numbers below LARGEST that are asked in evaluations only."""
_NUMBER = re.compile(r"\d+")


@functools.cache
def held_out_sums() -> list[tuple[int, int]]:
    """Return the pairs of numbers of the evaluation, which do not depend on any seed."""
    pairs = [(a, b) for a in range(LARGEST) for b in range(LARGEST)]
    random.Random(20).shuffle(pairs)
    return pairs[:HELD_OUT]


def number_in(action: str) -> int | None:
    """Return the last number of the answer, None without one."""
    found = _NUMBER.findall(final_answer(action))
    return int(found[-1]) if found else None


class Addition(Environment):
    """Add two numbers below ``options["below"][difficulty]``. ``options["instruction"]`` stands before the question."""

    def reset(self) -> list[dict[str, Any]]:
        below = self.task.options["below"][self.task.difficulty]
        rng = random.Random(self.task.seed)
        pair = self.task.metadata.get("numbers")
        while pair is None or (not self.task.evaluation and tuple(pair) in held_out_sums()):
            pair = rng.randrange(below), rng.randrange(below)
        self.sum = sum(pair)
        return [{"role": "user", "content": self.task.options.get("instruction", "") + question(*pair)}]

    def step(self, action: str) -> Step:
        return Step(reward=float(number_in(action) == self.sum), done=True)


def hunt_size(difficulty: int) -> tuple[int, int]:
    """Return how many numbers there are, and how many guesses: as many as halving needs at most."""
    guesses = difficulty + 2
    return 2**guesses - 1, guesses


class Hunt(Environment):
    """Find a number from 1 to ``hunt_size``; the answers are ``+`` (it is larger) and ``-``."""

    def reset(self) -> list[dict[str, Any]]:
        size, self.guesses = hunt_size(self.task.difficulty)
        number = self.task.metadata.get("number")
        self.number = random.Random(self.task.seed).randint(1, size) if number is None else number
        return [{"role": "user", "content": f"{self.task.options.get('instruction', '')}01..{size:02d}"}]

    def step(self, action: str) -> Step:
        self.guesses -= 1
        guess = number_in(action)
        if guess == self.number:
            return Step(reward=1.0, done=True)
        hint = "?" if guess is None else "+" if guess < self.number else "-"
        return Step(hint, done=self.guesses == 0)
