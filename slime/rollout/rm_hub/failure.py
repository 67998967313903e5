"""Rewards that could not be computed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from slime.utils.types import Sample

KINDS = ("raised", "timeout", "memory", "crashed", "remote")
"""It raised, took too long, ran out of memory, ended its process, or its server did not answer."""


class RewardFailure(RuntimeError):
    """The failure to compute one reward: ``kind`` (one of KINDS) and, where there is one, the traceback.

    ``by_answer``: the limit on CPU time or memory was exceeded, which does not depend on how busy the machine is.
    """

    def __init__(self, kind: str, message: str, details: str = "", *, by_answer: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.details = details
        self.by_answer = by_answer


class JobEnded(RewardFailure):
    """The process that was made for the job ended without an answer. The worker that made it is well."""


class TooManyRewardFailures(RuntimeError):
    """More than the tolerated share of a rollout's rewards failed: the run is to stop."""


class BadReward(TypeError, ValueError):
    """A custom reward returned what cannot be a reward: its code is wrong, and the run stops at once."""


class LateFailures:
    """Failures after the end of a rollout, kept until a rollout gets their samples again and counts them. Failures of
    deleted samples are dropped."""

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
