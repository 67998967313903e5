"""Checks of training data; every message names the sample, the field, what was expected and what was seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from slime.batching.errors import TrainDataError
from slime.batching.ragged import Ragged
from slime.batching.top_p_mask import check_top_p_mask

REQUIRED_KEYS = ("tokens", "response_lengths", "rewards", "loss_masks")

RESERVED_KEYS = ("partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes", "local_raw_reward")
"""Columns that ranks are given besides the samples' own."""

LARGEST_LOG_PROB = 1e-3
"""A log-prob is at most 0, but for the rounding of whoever computed it."""

Namer = Callable[[int], str]


def sample_namer(sample_indices: Sequence[int | None] | np.ndarray | None) -> Namer:
    """Return a function that names the sample at a position, with its sample index where there is one."""

    def name(position: int) -> str:
        if sample_indices is None or sample_indices[position] is None:
            return f"sample at position {position}"
        return f"sample index={sample_indices[position]} (position {position})"

    return name


def required_keys(data: Mapping[str, Any]) -> None:
    """Raise when a key that training cannot do without is missing or one of its own is there, and without a sample."""
    missing = [key for key in REQUIRED_KEYS if data.get(key) is None]
    if missing:
        raise TrainDataError(
            f"train data lacks {', '.join(missing)}; it has {', '.join(sorted(data))}. A converter given by "
            f"--custom-convert-samples-to-train-data-path must return at least {', '.join(REQUIRED_KEYS)}"
        )
    if taken := [key for key in RESERVED_KEYS if data.get(key) is not None]:
        raise TrainDataError(
            f"train data has the key {', '.join(taken)}, with which ranks learn the schedule; name yours differently"
        )
    if not len(data["tokens"]):
        raise TrainDataError("train data holds no sample; the rollout produced nothing to train on")


def has_entries(values: Any, count: int) -> bool:
    """Return whether ``values`` is a list, an array or the like of ``count`` entries."""
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__") or getattr(values, "ndim", 1) == 0:
        return False
    return len(values) == count


def one_entry_per_sample(fields: Mapping[str, Any], count: int) -> None:
    """Raise when a field does not hold exactly ``count`` entries."""
    for key, values in fields.items():
        if not has_entries(values, count):
            sized = hasattr(values, "__len__") and getattr(values, "ndim", 1) != 0
            seen = f"{len(values)} entries" if sized else repr(values)
            raise TrainDataError(f"train data field {key!r} must hold one entry per sample ({count}), got {seen}")


def number_column(values: Any, dtype: str, field: str, name_of: Namer) -> np.ndarray:
    """Return one number per sample as an array of ``dtype``; integers must be exact, numbers finite."""
    entries = values.tolist() if hasattr(values, "tolist") else list(values)
    if None in entries:
        raise TrainDataError(f"{name_of(entries.index(None))}: {field} is None, expected a number")
    column = np.asarray(entries)
    if column.ndim != 1 or column.dtype.kind not in "biuf":
        raise TrainDataError(f"train data field {field!r} must hold one number per sample, got e.g. {entries[0]!r}")
    if column.dtype.kind == "f" and not np.isfinite(column).all():
        position = int(np.flatnonzero(~np.isfinite(column))[0])
        raise TrainDataError(f"{name_of(position)}: {field} is {column[position]}, expected a finite number")
    with np.errstate(invalid="ignore", over="ignore"):
        converted = column.astype(dtype)
    if converted.dtype.kind in "iu" and not np.array_equal(converted, column):
        position = int(np.flatnonzero(converted != column)[0])
        raise TrainDataError(f"{name_of(position)}: {field} is {column[position]}, expected a whole number for {dtype}")
    return converted


def columns(ragged: Mapping[str, Ragged], numbers: Mapping[str, np.ndarray], name_of: Namer) -> None:
    """Check lengths and values of all per-token columns against each other."""
    total, response = ragged["tokens"].lengths, numbers["response_lengths"]
    _all(
        (response >= 0) & (response < total),
        lambda i: (
            f"{name_of(i)}: response length {response[i]} with {total[i]} tokens; expected at least one prompt "
            "token before the response, since a token without predecessor has no log-prob"
        ),
    )
    expected = {
        "loss_masks": response,
        "rollout_log_probs": response,
        "teacher_log_probs": response,
        "rollout_top_p_token_offsets": response + 1,
        "rollout_routed_experts": total - 1,
    }
    for key, lengths in expected.items():
        if key in ragged:
            _lengths(key, ragged[key].lengths, lengths, response, name_of)
    for key in ("rollout_log_probs", "teacher_log_probs"):
        if key in ragged:
            _finite(key, ragged[key], name_of)
            _no_positive_log_prob(key, ragged[key], name_of)
    check_top_p_mask(ragged, name_of)
    _no_negative("tokens", ragged["tokens"], name_of)
    _no_negative("loss_masks", ragged["loss_masks"], name_of)
    _zero_or_one(ragged["loss_masks"], name_of)


def _lengths(key: str, seen: np.ndarray, expected: np.ndarray, response: np.ndarray, name_of: Namer) -> None:
    _all(
        seen == expected,
        lambda i: (
            f"{name_of(i)}: {key} has {seen[i]} entries, expected {expected[i]} for response length {response[i]}"
        ),
    )


def _all(good: np.ndarray, message: Callable[[int], str]) -> None:
    if not good.all():
        raise TrainDataError(message(int(np.flatnonzero(~good)[0])))


def _row_of(column: Ragged, entry: int) -> tuple[int, int]:
    """Row and place within it of an entry of the flat values."""
    row = int(np.searchsorted(column.offsets, entry, side="right")) - 1
    return row, entry - int(column.offsets[row])


def _finite(key: str, column: Ragged, name_of: Namer) -> None:
    bad = np.flatnonzero(~np.isfinite(column.values))
    if bad.size:
        row, place = _row_of(column, int(bad[0]))
        raise TrainDataError(
            f"{name_of(row)}: {key}[{place}] is {column.values[bad[0]]}, expected a finite log-prob "
            f"({bad.size} such values in the batch)"
        )


def _no_positive_log_prob(key: str, column: Ragged, name_of: Namer) -> None:
    bad = np.flatnonzero(column.values > LARGEST_LOG_PROB)
    if bad.size:
        row, place = _row_of(column, int(bad[0]))
        raise TrainDataError(
            f"{name_of(row)}: {key}[{place}] is {column.values[bad[0]]}, expected a log-prob, which is at most 0 "
            f"({bad.size} such values in the batch); are these probabilities, or log-probs with another sign?"
        )


def _zero_or_one(masks: Ragged, name_of: Namer) -> None:
    bad = np.flatnonzero(masks.values > 1)
    if bad.size:
        row, place = _row_of(masks, int(bad[0]))
        raise TrainDataError(
            f"{name_of(row)}: loss_masks[{place}] is {masks.values[bad[0]]}, expected 1 for a token to train on and 0 "
            "for any other"
        )


def _no_negative(key: str, column: Ragged, name_of: Namer) -> None:
    if column.values.size and column.values.min() < 0:
        entry = int(np.flatnonzero(column.values < 0)[0])
        row, place = _row_of(column, entry)
        raise TrainDataError(f"{name_of(row)}: {key}[{place}] is {column.values[entry]}, expected 0 or more")
