"""Rewards that failed after their rollout had ended."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from slime.rollout.rm_hub.failure import RewardFailure
from slime.utils.types import Sample


class LateFailures:
    """Failures that no rollout has counted, until their samples come back to one; those of samples that are gone are
    forgotten."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Sample], RewardFailure]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, sample: Sample, error: RewardFailure) -> None:
        """Remember that the reward of ``sample`` failed. (Any other exception might hold the sample by its frames.)"""
        number = id(sample)
        self._found[number] = weakref.ref(sample, lambda _: self._found.pop(number, None)), error

    def take(self, samples: Iterable[Sample]) -> list[tuple[Sample, RewardFailure]]:
        """Return those of ``samples`` whose rewards failed, with the errors, and forget them."""
        return [(s, found[1]) for s in samples if (found := self._found.pop(id(s), None)) is not None]
