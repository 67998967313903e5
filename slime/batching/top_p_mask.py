"""Check of the top-p masks: the tokens that engines sampled among (``--rollout-top-p``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from slime.batching.errors import TrainDataError
from slime.batching.ragged import Ragged

IDS, OFFSETS = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"


def check_top_p_mask(
    ragged: Mapping[str, Ragged], name_of: Callable[[int], str], vocab_size: int | None = None
) -> None:
    """Check the columns of top-p masks against each other, as far as they are there.

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
        row, token = _place(masks, int(empty[0]))
        raise TrainDataError(
            f"{name_of(row)}: response token {token} is trained but has no top-p mask ({empty.size} such tokens in the "
            "batch); give those that were not sampled loss mask 0"
        )
    if vocab_size is not None:
        _check_ids(ids, sizes, name_of, vocab_size)


def _sizes(ids: Ragged, offsets: Ragged, name_of: Callable[[int], str]) -> np.ndarray:
    """Return the size of every response token's mask, sample after sample; checks the offsets."""
    bounds, starts, ends = offsets.values, offsets.offsets[:-1], offsets.offsets[1:]
    wrong = (offsets.lengths == 0) | (bounds[starts] != 0) | (bounds[ends - 1] != ids.lengths)
    steps = np.diff(bounds)
    within = np.ones(len(steps), dtype=bool)
    within[starts[1:] - 1] = False  # from one sample to the next
    falling = np.flatnonzero(within & (steps < 0))
    if wrong.any() or falling.size:
        row = int(np.flatnonzero(wrong)[0]) if wrong.any() else _place(offsets, int(falling[0]))[0]
        seen = offsets[row]
        raise TrainDataError(
            f"{name_of(row)}: {OFFSETS} must rise from 0 to {ids.lengths[row]}, the number of {IDS}; they go from "
            f"{seen[0]} to {seen[-1]}" + ("" if wrong[row] else " and fall in between")
        )
    sizes: np.ndarray = steps[within]
    return sizes


def _check_ids(ids: Ragged, sizes: np.ndarray, name_of: Callable[[int], str], vocab_size: int) -> None:
    values = ids.values.astype(np.int64)
    outside = np.flatnonzero((values < 0) | (values >= vocab_size))
    if outside.size:
        row, _ = _place(ids, int(outside[0]))
        raise TrainDataError(
            f"{name_of(row)}: a top-p mask holds token id {values[outside[0]]}, but --vocab-size is {vocab_size}"
        )
    keys = np.repeat(np.arange(len(sizes)), sizes) * vocab_size + values
    order = np.argsort(keys, kind="stable")
    twice = np.flatnonzero(np.diff(keys[order]) == 0)
    if twice.size:
        entry = int(order[twice[0]])
        raise TrainDataError(f"{name_of(_place(ids, entry)[0])}: a top-p mask holds token id {values[entry]} twice")


def _place(column: Ragged, entry: int) -> tuple[int, int]:
    """Row and place within it of an entry of the flat values."""
    row = int(np.searchsorted(column.offsets, entry, side="right")) - 1
    return row, entry - int(column.offsets[row])
