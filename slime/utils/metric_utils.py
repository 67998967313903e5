"""Old path of the step of a rollout's metrics."""

from __future__ import annotations

from slime.utils.moved import moved

_HOMES = {
    "compute_rollout_step": "slime.observability.steps.rollout_step",
}
__all__ = list(_HOMES)
__getattr__ = moved(__name__, _HOMES)
