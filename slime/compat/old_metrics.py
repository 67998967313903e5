"""Metrics of rollouts by the functions of slime <= 0.3.1. Nothing here is used by slime itself."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from slime.arguments.args import Args
from slime.utils.declared import with_defaults

_METRICS = "slime.ray.manager.rollout_metrics"


def compute_pass_rate(
    flat_rewards: Sequence[float], group_size: int, num_groups: int | None = None
) -> dict[str, float]:
    """Return ``pass@k`` for k = 1, 2, 4, ... of rewards group by group; empty for groups of one."""
    if group_size == 1:
        return {}
    count = len(flat_rewards) // group_size if num_groups is None else num_groups
    if len(flat_rewards) != count * group_size:
        raise AssertionError(f"{len(flat_rewards)} rewards are not {count} groups of {group_size}")
    groups = [flat_rewards[start : start + group_size] for start in range(0, len(flat_rewards), group_size)]
    rates: dict[str, float] = import_module(_METRICS).pass_rates(groups)
    return rates


def compression_ratio(
    data: str | bytes, *, encoding: str = "utf-8", algorithm: str = "zlib", level: int = 9
) -> tuple[float, float]:
    """Return (size / compressed size, percentage saved) of ``data``; (inf, 0) for none."""
    raw = data.encode(encoding) if isinstance(data, str) else data
    if not raw:
        return float("inf"), 0.0
    compressed = {
        "zlib": lambda: zlib.compress(raw, level),
        "gzip": lambda: gzip.compress(raw, compresslevel=level),
        "bz2": lambda: bz2.compress(raw, level),
        "lzma": lambda: lzma.compress(raw, preset=level),
    }
    if algorithm not in compressed:
        raise ValueError(f"algorithm {algorithm!r}: expected one of {', '.join(compressed)}")
    size = len(compressed[algorithm]())
    return len(raw) / size, 100.0 * (1.0 - size / len(raw))


def compute_metrics_from_samples(args: Args, samples: Sequence[Any]) -> dict[str, float]:
    """Return lengths, truncation, repetition and groups without a difference, without a prefix."""
    metrics, args = import_module(_METRICS), with_defaults(args)
    return {**metrics.sample_metrics(args, samples), **metrics.zero_std_counts(args, samples)}


def compute_perf_metrics_from_samples(args: Args, samples: Sequence[Any], rollout_time: float) -> dict[str, float]:
    """Return the rollout's time and tokens per second, without a prefix."""
    found: dict[str, float] = import_module(_METRICS).speed_metrics(with_defaults(args), samples, rollout_time)
    return found


def log_rollout_data(
    rollout_id: int,
    args: Args,
    samples: Sequence[Any],
    rollout_extra_metrics: Mapping[str, Any] | None,
    rollout_time: float,
) -> None:
    """Log what slime logs of a rollout by default, and ``rollout_extra_metrics``; for log hooks that add their own."""
    args = with_defaults(args)
    metrics = import_module(_METRICS).rollout_metrics(args, samples, rollout_time) | dict(rollout_extra_metrics or {})
    step = import_module("slime.observability.tracking").rollout_step(args, rollout_id)
    log = import_module("slime.observability.logging_utils").log
    log(args, {**metrics, "rollout/step": step}, "rollout/step")


def update_tracking_open_metrics(args: Args, router_addr: str | None = None) -> None:
    """Do nothing: trackers need no address of a router."""
    del args, router_addr
