"""Old path of ``slime.observability.logging_utils``."""

from __future__ import annotations

from slime.utils.moved import moved

_HOMES = {
    "configure_logger": "slime.observability.logging_utils.configure_logger",
    "finish_tracking": "slime.observability.logging_utils.finish_tracking",
    "init_tracking": "slime.observability.logging_utils.init_tracking",
    "log": "slime.observability.logging_utils.log",
}
__all__ = list(_HOMES)
__getattr__ = moved(__name__, _HOMES)
