"""A reward that could not be computed."""

from __future__ import annotations

KINDS = ("raised", "timeout", "memory", "crashed", "remote")
"""It raised, took too long, ran out of memory, ended its process, or its server did not answer."""


class RewardFailure(RuntimeError):
    """Why one reward could not be computed: ``kind`` (one of KINDS) and, where there is one, the traceback."""

    def __init__(self, kind: str, message: str, details: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.details = details


class TooManyRewardFailures(RuntimeError):
    """More than the tolerated share of a rollout's rewards failed: the run is to stop."""


class BadReward(TypeError, ValueError):
    """A custom reward returned what cannot be a reward: its code is wrong, and the run stops at once."""
