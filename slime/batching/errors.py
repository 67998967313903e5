"""Errors of this package, under the names callers of slime <= 0.3.1 catch."""

from __future__ import annotations


class TrainDataError(ValueError, AssertionError):
    """Rollout data that cannot be trained on; the message names the sample, the field and both numbers."""


class ScheduleError(ValueError, AssertionError):
    """Samples that cannot be divided over data-parallel ranks and micro-batches as the flags demand."""
