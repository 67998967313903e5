"""The path under which slime <= 0.3.1 had the rollout manager."""

from slime.ray.rollout_manager import RolloutManager

__all__ = ["RolloutManager"]
