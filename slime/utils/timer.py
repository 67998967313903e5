"""Old path of ``slime.observability.timer``."""

from __future__ import annotations

from slime.utils.moved import moved

_HOMES = {
    "timer": "slime.observability.timer.timer",
}
__all__ = list(_HOMES)
__getattr__ = moved(__name__, _HOMES)
