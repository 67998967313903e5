"""Rollout ids: samples that came out of one execution share one, and weigh together in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slime.batching.errors import TrainDataError


def fill_rollout_ids(rollout_ids: Sequence[int | None]) -> list[int]:
    """Replace every None by the smallest integer not used yet, in order: each such sample stands alone."""
    used = {rollout_id for rollout_id in rollout_ids if rollout_id is not None}
    filled: list[int] = []
    candidate = 0
    for rollout_id in rollout_ids:
        if rollout_id is None:
            while candidate in used:
                candidate += 1
            rollout_id = candidate
            candidate += 1
        filled.append(_whole(rollout_id, len(filled)))
    return filled


def _whole(rollout_id: Any, position: int) -> int:
    try:
        if (whole := int(rollout_id)) == rollout_id:
            return whole
    except (TypeError, ValueError, OverflowError):
        pass
    raise TrainDataError(
        f"sample at position {position}: rollout_id {rollout_id!r} is no whole number; expected one, or None"
    )


def mask_sums_by_rollout(rollout_ids: Sequence[int], mask_sums: np.ndarray) -> np.ndarray:
    """Return, per sample, the trained tokens of its whole rollout: float32 [n] from per-sample sums [n]."""
    _, inverse = np.unique(np.asarray(rollout_ids), return_inverse=True)
    return np.bincount(inverse, weights=mask_sums).astype(np.float32)[inverse]
