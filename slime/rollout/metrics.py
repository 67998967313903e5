"""Numbers about the engine calls of a rollout: latencies and nucleus sizes. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from slime.utils.types import Sample

_REQUEST_ATTRIBUTES = {
    "e2e_latency": "request/e2e_latency",
    "queue_time": "request/queue_time",
    "decode_throughput": "decode/throughput",
}


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
    """Return ``perf/request/*`` and ``perf/decode/*`` statistics of the engine calls in the samples' traces."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        trace = getattr(sample, "trace", None)
        for event in trace.get("events", []) if isinstance(trace, Mapping) else []:
            if event.get("type") != "span_end" or event.get("name") != "sglang_generate":
                continue
            for key, name in _REQUEST_ATTRIBUTES.items():
                value = (event.get("attrs") or {}).get(key)
                if isinstance(value, (int, float)):
                    values.setdefault(name, []).append(float(value))
    found: dict[str, float] = {}
    for name, numbers in values.items():
        found |= summary(numbers, f"perf/{name}/")
    return found


def top_p_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return ``rollout/top_p_kept_vocab_per_token``: the mean nucleus size of generated tokens, where recorded."""
    kept = tokens = 0
    for sample in samples:
        if sample.rollout_top_p_token_offsets is not None:
            kept += int(sample.rollout_top_p_token_offsets[-1])
            tokens += sample.effective_response_length
    return {"rollout/top_p_kept_vocab_per_token": kept / tokens} if tokens else {}
