"""Public names for dividing samples into bins; they live in ``slime.batching.seqlen_balancing``."""

from __future__ import annotations

from typing import Any

__all__ = [  # noqa: F822
    "expand_bins_by_splitting",
    "first_fit_pack",
    "get_reverse_idx",
    "get_seqlen_balanced_partitions",
    "karmarkar_karp",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("slime.batching.seqlen_balancing"), name)
