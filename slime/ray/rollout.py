"""The path under which slime <= 0.3.1 had the rollout manager and the step of its metrics."""

from __future__ import annotations

from slime.ray.rollout_manager import RolloutManager
from slime.utils.moved import moved

__all__ = ["RolloutManager", "compute_rollout_step"]  # noqa: F822

__getattr__ = moved(__name__, {"compute_rollout_step": "slime.observability.steps.rollout_step"})
