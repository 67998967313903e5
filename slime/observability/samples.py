"""A few samples of every rollout, kept for people: ``<run_dir>/samples/<rollout_id>.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.observability.best_effort import Files
from slime.utils.types import iter_samples

if TYPE_CHECKING:
    from slime.arguments.args import Args

LIMIT = 24
"""Samples kept per rollout (and per evaluation data set)."""

MAX_CHARS = 20_000
"""Longest prompt or response kept; the middle of a longer one is cut out."""

_ENDS_OF_LINES = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Escapes of what ends a line for ``str.splitlines``; JSON has one for each of the others."""

_files = Files("samples")


def write(
    args: Args,
    rollout_id: int,
    samples: object,
    evaluation: bool = False,
    *,
    limit: int = LIMIT,
) -> Path | None:
    """Keep up to ``limit`` of ``samples``, evenly spread, and return the file.

    ``samples`` is a (nested) list of :class:`slime.utils.types.Sample`, or, for an evaluation, a mapping
    ``{data set: {"samples": [...]}}`` or ``{data set: [...]}``. Does nothing (returns None) without a run directory.
    Evaluations go to ``eval-<rollout_id>.jsonl``. The file appears whole or not at all, on a full disk later.
    """
    if not args.run_dir:
        return None
    rows = []
    for dataset, group in _datasets(samples):
        flat = list(iter_samples(group))
        step = max(1, len(flat) / limit)
        for i in range(min(limit, len(flat))):
            rows.append(to_row(flat[int(i * step)], dataset))
    path = Path(args.run_dir) / "samples" / f"{'eval-' if evaluation else ''}{rollout_id}.jsonl"
    text = "".join(json.dumps(row, ensure_ascii=False).translate(_ENDS_OF_LINES) + "\n" for row in rows)
    _files.write(path, text.encode(errors="backslashreplace"))  # half of a surrogate pair has no UTF-8
    return path


def _datasets(samples: object) -> Iterator[tuple[str | None, Any]]:
    if not isinstance(samples, Mapping):
        yield None, samples
        return
    for name, value in samples.items():
        yield str(name), value.get("samples") or [] if isinstance(value, Mapping) else value


def to_row(sample: object, dataset: str | None = None) -> dict[str, Any]:
    """Return what the report shows of one sample."""
    status = getattr(sample, "status", None)
    row = {
        "dataset": dataset,
        "index": getattr(sample, "index", None),
        "group_index": getattr(sample, "group_index", None),
        "prompt": _text(getattr(sample, "prompt", None)),
        "response": _text(getattr(sample, "response", None)),
        "label": _text(getattr(sample, "label", None)),
        "reward": _jsonable(getattr(sample, "reward", None)),
        "status": status.value if isinstance(status, Enum) else status,
        "response_length": getattr(sample, "response_length", None),
    }
    if metadata := getattr(sample, "metadata", None):
        row["metadata"] = _text(_jsonable(metadata))
    return {k: v for k, v in row.items() if v is not None}


def _text(value: object) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(_jsonable(value), ensure_ascii=False)
    if len(text) > MAX_CHARS:
        half = MAX_CHARS // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
    return text


def _jsonable(value: object) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, Mapping):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)) and not hasattr(value, "shape"):
        return [_jsonable(v) for v in value]
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        return _jsonable(item())
    return repr(value)
