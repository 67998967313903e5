"""Checks of training data; every message names the sample, the field, what was expected and what was seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from slime.batching.errors import TrainDataError
from slime.batching.ragged import Ragged

REQUIRED_KEYS = ("tokens", "response_lengths", "rewards", "loss_masks")

RESERVED_KEYS = ("partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes", "local_raw_reward")
"""Columns that ranks are given besides the samples' own."""

LARGEST_LOG_PROB = 1e-3
"""A log-prob is at most 0, but for the rounding of its computation."""

IDS, OFFSETS = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"
"""Columns of the top-p masks: the tokens that engines sampled among (``--rollout-top-p``)."""

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


def has_entries(values: object, count: int) -> bool:
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


def number_column(values: Iterable[Any], dtype: str, field: str, name_of: Namer) -> np.ndarray:
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
        OFFSETS: response + 1,
        "rollout_routed_experts": total - 1,
    }
    for key, lengths in expected.items():
        if key in ragged:
            _lengths(key, ragged[key].lengths, lengths, response, name_of)
    for key in ("rollout_log_probs", "teacher_log_probs"):
        if key in ragged:
            values = ragged[key].values
            _entries(key, ragged[key], ~np.isfinite(values), name_of, "a finite log-prob")
            sign = "a log-prob, which is at most 0; are these probabilities, or log-probs with another sign?"
            _entries(key, ragged[key], values > LARGEST_LOG_PROB, name_of, sign)
    check_top_p_mask(ragged, name_of)
    tokens, masks = ragged["tokens"], ragged["loss_masks"]
    _entries("tokens", tokens, tokens.values < 0, name_of, "0 or more")
    of_masks = "1 for a token to train on and 0 for any other"
    _entries("loss_masks", masks, (masks.values < 0) | (masks.values > 1), name_of, of_masks)
    sums = numbers["rollout_mask_sums"]
    _all(sums >= 0, lambda i: f"{name_of(i)}: rollout_mask_sums is {sums[i]}, expected 0 or more")


def vocabulary(tokens: Ragged, vocab_size: int, name_of: Namer) -> None:
    """Check that token ids are below ``vocab_size``."""
    expected = f"less than --vocab-size {vocab_size}; is the rollout's tokenizer the model's?"
    _entries("tokens", tokens, tokens.values >= vocab_size, name_of, expected)


def check_top_p_mask(ragged: Mapping[str, Ragged], name_of: Namer, vocab_size: int | None = None) -> None:
    """Check the columns of top-p masks against each other, as far as they are present.

    Per sample, token ids [k] and response_length + 1 offsets into them: response token ``t`` was sampled among
    ``ids[offsets[t]:offsets[t + 1]]``. Tokens that no engine sampled have none and must not be trained. With
    ``vocab_size`` also that ids are distinct within a mask and below it, which costs a sort.

    Raises TrainDataError naming the sample.
    """
    if (IDS in ragged) != (OFFSETS in ragged):
        there, absent = (IDS, OFFSETS) if IDS in ragged else (OFFSETS, IDS)
        raise TrainDataError(f"train data has {there} but no {absent}; a top-p mask needs both")
    if IDS not in ragged:
        return
    ids, offsets = ragged[IDS], ragged[OFFSETS]
    sizes = _sizes(ids, offsets, name_of)
    masks = ragged["loss_masks"]
    empty = np.flatnonzero((sizes == 0) & (masks.values != 0))
    if empty.size:
        row, token = _row_of(masks, int(empty[0]))
        raise TrainDataError(
            f"{name_of(row)}: response token {token} is trained but has no top-p mask ({empty.size} such tokens in the "
            "batch); give those that were not sampled loss mask 0"
        )
    if vocab_size is not None:
        _check_ids(ids, sizes, name_of, vocab_size)


def _sizes(ids: Ragged, offsets: Ragged, name_of: Namer) -> np.ndarray:
    """Return the size of every response token's mask, sample after sample; checks the offsets."""
    bounds, starts, ends = offsets.values, offsets.offsets[:-1], offsets.offsets[1:]
    wrong = (offsets.lengths == 0) | (bounds[starts] != 0) | (bounds[ends - 1] != ids.lengths)
    steps = np.diff(bounds)
    within = np.ones(len(steps), dtype=bool)
    within[starts[1:] - 1] = False  # from one sample to the next
    falling = np.flatnonzero(within & (steps < 0))
    if wrong.any() or falling.size:
        row = int(np.flatnonzero(wrong)[0]) if wrong.any() else _row_of(offsets, int(falling[0]))[0]
        seen = offsets[row]
        raise TrainDataError(
            f"{name_of(row)}: {OFFSETS} must rise from 0 to {ids.lengths[row]}, the number of {IDS}; they go from "
            f"{seen[0]} to {seen[-1]}" + ("" if wrong[row] else " and fall in between")
        )
    sizes: np.ndarray = steps[within]
    return sizes


def _check_ids(ids: Ragged, sizes: np.ndarray, name_of: Namer, vocab_size: int) -> None:
    values = ids.values.astype(np.int64)
    outside = np.flatnonzero((values < 0) | (values >= vocab_size))
    if outside.size:
        row, _ = _row_of(ids, int(outside[0]))
        raise TrainDataError(
            f"{name_of(row)}: a top-p mask holds token id {values[outside[0]]}, but --vocab-size is {vocab_size}"
        )
    keys = np.repeat(np.arange(len(sizes)), sizes) * vocab_size + values
    order = np.argsort(keys, kind="stable")
    twice = np.flatnonzero(np.diff(keys[order]) == 0)
    if twice.size:
        entry = int(order[twice[0]])
        raise TrainDataError(f"{name_of(_row_of(ids, entry)[0])}: a top-p mask holds token id {values[entry]} twice")


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


def _entries(key: str, column: Ragged, bad: np.ndarray, name_of: Namer, expected: str) -> None:
    """Raise for the first entry of the column that is ``bad`` (bool, like its flat values), if there is one."""
    if bad.any():
        entries = np.flatnonzero(bad)
        row, place = _row_of(column, int(entries[0]))
        raise TrainDataError(
            f"{name_of(row)}: {key}[{place}] is {column.values[entries[0]]}, expected {expected} ({entries.size} such "
            "values in the batch)"
        )


def _row_of(column: Ragged, entry: int) -> tuple[int, int]:
    """Row and place within it of an entry of the flat values."""
    row = int(np.searchsorted(column.offsets, entry, side="right")) - 1
    return row, entry - int(column.offsets[row])
