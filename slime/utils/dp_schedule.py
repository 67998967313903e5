"""Public names of the data-parallel schedule; it lives in ``slime.batching.schedule``."""

from __future__ import annotations

from typing import Any

__all__ = ["DpSchedule", "build_dp_schedule", "leftover_positions"]  # noqa: F822


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("slime.batching.schedule"), name)
