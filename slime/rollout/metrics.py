"""Numbers about the engine calls of a rollout: latencies and sizes of top-p masks. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime.rollout.staleness import trained_steps, weight_clock
from slime.utils.types import Sample

MAX_LAG_SHOWN = 16

_REQUEST_ATTRIBUTES = {
    "e2e_latency": "request/e2e_latency",
    "queue_time": "request/queue_time",
    "decode_throughput": "decode/throughput",
}
_PHASES = {
    "sglang_prefill": "prefill/time",
    "sglang_pd_prefill": "prefill/time",
    "sglang_decode": "decode/time",
    "sglang_pd_decode": "decode/time",
}
"""By the span of a trace."""


def summary(values: Sequence[float], prefix: str) -> dict[str, float]:
    """Return ``<prefix>mean``, ``median``, ``max`` and ``min``; nothing for no values."""
    if not values:
        return {}
    return {
        f"{prefix}mean": statistics.fmean(values),
        f"{prefix}median": float(statistics.median(values)),
        f"{prefix}max": float(max(values)),
        f"{prefix}min": float(min(values)),
    }


def request_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return statistics of the engine calls in the samples' traces: ``perf/request/*``, ``perf/decode/throughput/*``
    and, of engines that report the phases, ``perf/{prefill,decode}/time/*`` in seconds."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        trace = getattr(sample, "trace", None)
        started: dict[Any, float] = {}
        for event in trace.get("events", []) if isinstance(trace, Mapping) else []:
            name = _PHASES.get(event.get("name"))
            if name and event.get("type") == "span_start":
                started[event.get("span_id")] = event["ts"]
            elif name and event.get("type") == "span_end" and event.get("span_id") in started:
                values.setdefault(name, []).append(float(event["ts"] - started.pop(event["span_id"])))
            elif event.get("type") == "span_end" and event.get("name") == "sglang_generate":
                for key, name in _REQUEST_ATTRIBUTES.items():
                    value = (event.get("attrs") or {}).get(key)
                    if isinstance(value, (int, float)):
                        values.setdefault(name, []).append(float(value))
    found: dict[str, float] = {}
    for name, numbers in values.items():
        found |= summary(numbers, f"perf/{name}/")
    return found


def top_p_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return ``rollout/top_p_kept_vocab_per_token``: the mean size of the top-p mask of a trained token."""
    kept = tokens = 0
    for sample in samples:
        if sample.rollout_top_p_token_offsets is None or sample.remove_sample:
            continue
        sizes = np.diff(np.asarray(sample.rollout_top_p_token_offsets))
        trained = np.ones(len(sizes), bool) if sample.loss_mask is None else np.asarray(sample.loss_mask) != 0
        kept += int(sizes[trained].sum())
        tokens += int(trained.sum())
    return {"rollout/top_p_kept_vocab_per_token": kept / tokens} if tokens else {}


def staleness_metrics(samples: Sequence[Sample], rollout_id: int) -> dict[str, float]:
    """Return ``rollout/staleness/*``: by how many training steps trained tokens lag behind rollout ``rollout_id``.

    ``mean``, ``max`` and the nearest-rank ``p99`` over tokens whose version is known, and the share of each lag
    (``lag_<k>``; the last one holds all from ``MAX_LAG_SHOWN`` on).
    """
    counts: Counter[int] = Counter()
    for sample in samples:
        for step, tokens in trained_steps(sample, weight_clock()):
            if step is not None:
                counts[rollout_id - step] += tokens
    total = sum(counts.values())
    if not total:
        return {}
    found = {
        "mean": sum(lag * tokens for lag, tokens in counts.items()) / total,
        "max": float(max(counts)),
        "p99": float(_nearest_rank(counts, 0.99)),
    }
    for lag in range(min(MAX_LAG_SHOWN, max(0, *counts)) + 1):
        tokens = counts[lag] if lag < MAX_LAG_SHOWN else sum(n for k, n in counts.items() if k >= lag)
        found[f"lag_{lag}"] = tokens / total
    return {f"rollout/staleness/{name}": value for name, value in found.items()}


def _nearest_rank(counts: Counter[int], share: float) -> int:
    """Return the smallest value at or below which lies ``share`` of the counted values."""
    rank, seen = math.ceil(share * sum(counts.values())), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= rank:
            return value
    raise ValueError("nothing was counted")
