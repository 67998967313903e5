"""Old path of ``slime_plugins.rollout_buffer.rollout_buffer_example``."""

from __future__ import annotations

from slime.utils.moved import moved

_HOMES = {
    "generate_rollout": "slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout",
}
__all__ = list(_HOMES)
__getattr__ = moved(__name__, _HOMES)
