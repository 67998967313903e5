"""Old path of ``slime.rollout.sft_rollout``."""

from __future__ import annotations

from slime.utils.moved import moved

_HOMES = {
    "generate_rollout": "slime.rollout.sft_rollout.generate_rollout",
}
__all__ = list(_HOMES)
__getattr__ = moved(__name__, _HOMES)
