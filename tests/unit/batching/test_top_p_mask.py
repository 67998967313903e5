"""TopPMask that cannot be right are refused by the name of the sample."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from slime.batching.errors import TrainDataError
from slime.batching.ragged import ragged_from_rows
from slime.batching.validate import IDS, OFFSETS, check_top_p_mask


def check(ids: list[list[int]], offsets: list[list[int]], masks: list[list[int]], **keywords: Any) -> None:
    rows = {IDS: ids, OFFSETS: offsets, "loss_masks": masks}
    check_top_p_mask(
        {key: ragged_from_rows(row, "int32", key) for key, row in rows.items()}, "sample {}".format, **keywords
    )


GOOD = ([[3, 4, 5], [], [2, 1]], [[0, 1, 1, 3], [0], [0, 2]], [[1, 0, 1], [], [1]])


def test_good_ones_pass() -> None:
    check(*GOOD)
    check(*GOOD, vocab_size=6)
    check_top_p_mask({}, "sample {}".format)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": (2, [1, 2])}, r"sample 2: .* must rise from 0 to 2, .*; they go from 1 to 2$"),
        ({"offsets": (0, [0, 1, 1, 2])}, r"sample 0: .* must rise from 0 to 3, .*; they go from 0 to 2$"),
        ({"offsets": (0, [0, 2, 1, 3])}, r"sample 0: .* they go from 0 to 3 and fall in between"),
        ({"masks": (0, [1, 1, 1])}, r"sample 0: response token 1 is trained but has no top-p mask \(1 such tokens"),
        ({"ids": (2, [2, 6])}, r"sample 2: a top-p mask holds token id 6, but --vocab-size is 6"),
        ({"ids": (2, [-1, 0])}, r"sample 2: a top-p mask holds token id -1"),
        ({"ids": (0, [3, 4, 4])}, r"sample 0: a top-p mask holds token id 4 twice"),
    ],
)
def test_bad_ones_are_named(changes: dict[str, tuple[int, list[int]]], message: str) -> None:
    rows = {name: [list(row) for row in part] for name, part in zip(("ids", "offsets", "masks"), GOOD, strict=True)}
    for name, (row, values) in changes.items():
        rows[name][row] = values
    with pytest.raises(TrainDataError, match=message):
        check(rows["ids"], rows["offsets"], rows["masks"], vocab_size=6)


def test_one_id_may_stand_in_many_top_p_masks() -> None:
    check([[1, 1], [1]], [[0, 1, 2], [0, 1]], [[1, 1], [1]], vocab_size=2)


def test_both_columns_or_neither() -> None:
    ragged = {IDS: ragged_from_rows([[1]], "int32", IDS), "loss_masks": ragged_from_rows([[1]], "int32", "loss_masks")}
    with pytest.raises(TrainDataError, match=f"has {IDS} but no {OFFSETS}"):
        check_top_p_mask(ragged, "sample {}".format)


def test_against_loops() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes = [rng.integers(0, 4, rng.integers(1, 5)) for _ in range(3)]
        ids = [[int(i) for size in row for i in rng.integers(0, 4, size)] for row in sizes]
        offsets = [[0, *np.cumsum(row).tolist()] for row in sizes]
        masks = [[int(rng.random() < 0.5 and size > 0) for size in row] for row in sizes]
        pieces = [row[a:b] for row, cut in zip(ids, offsets, strict=True) for a, b in itertools.pairwise(cut)]
        distinct = all(len(set(piece)) == len(piece) for piece in pieces)
        if distinct:
            check(ids, offsets, masks, vocab_size=4)
        else:
            with pytest.raises(TrainDataError, match="twice"):
                check(ids, offsets, masks, vocab_size=4)
