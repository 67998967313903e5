"""Functions of slime <= 0.3.1 whose homes are called in another way. Nothing here is used by slime itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any


def calculate_fwd_flops(seqlens: Sequence[int], args: Any) -> float:
    """Return the FLOPs of one forward pass over sequences of these lengths: ``slime.batching.flops.forward_flops``."""
    return float(import_module("slime.batching.flops").forward_flops(args, seqlens))


def compute_statistics(values: Sequence[float]) -> dict[str, float]:
    """Return ``mean, median, max, min`` of ``values``; empty for none."""
    return import_module("slime.ray.rollout_metrics").statistics(values, "") if values else {}


def dict_add_prefix(d: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return ``d`` with ``prefix`` before every key."""
    return {f"{prefix}{key}": value for key, value in d.items()}
