"""Rows of different lengths as one contiguous array plus offsets."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.batching.errors import TrainDataError

_STRUCT_CODES = {"int8": "b", "int32": "i", "int64": "q", "float32": "f", "float64": "d"}


@dataclass(frozen=True, eq=False)
class Ragged:
    """``values`` [total, ...] contiguous; row ``i`` is ``values[offsets[i]:offsets[i + 1]]``; offsets int64 [n + 1]."""

    values: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        """Return row ``i`` as a view."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        row: np.ndarray = self.values[self.offsets[i] : self.offsets[i + 1]]
        return row

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n], number of entries per row."""
        return np.diff(self.offsets)

    def take(self, positions: np.ndarray) -> Ragged:
        """Return the rows at ``positions`` [m], in that order, in new contiguous memory."""
        offsets = offsets_of(self.lengths[positions])
        values = np.empty((offsets[-1], *self.values.shape[1:]), dtype=self.values.dtype)
        start, end = self.offsets[positions].tolist(), self.offsets[positions + 1].tolist()
        for a, b, at in zip(start, end, offsets.tolist(), strict=False):
            values[at : at + b - a] = self.values[a:b]
        return Ragged(values, offsets)

    def row_sums(self) -> np.ndarray:
        """Sum of every row [n] of one-dimensional values, in float64 (integers: int64)."""
        wide = np.int64 if self.values.dtype.kind in "iu" else np.float64
        running = np.zeros(len(self.values) + 1, dtype=wide)
        np.cumsum(self.values, dtype=wide, out=running[1:])
        sums: np.ndarray = running[self.offsets[1:]] - running[self.offsets[:-1]]
        return sums


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return int64 [n + 1] boundaries of rows with these lengths."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ragged_from_rows(
    rows: Sequence[Any], dtype: str | None, field: str, name_of: Callable[[int], str] = "sample {}".format
) -> Ragged:
    """Copy rows (lists, arrays or tensors, of any mix) into one array of ``dtype`` (None: that of the first row).

    A list of plain numbers costs about 7 ns per number. Conversions must be exact for integers: a token id beyond
    int32 or a mask of 0.5 raises TrainDataError, which names the sample (``name_of(i)``) and the field.
    """
    arrays = [
        row if isinstance(row, (list, tuple)) else _as_array(row, field, name_of(i)) for i, row in enumerate(rows)
    ]
    typed = next((row for row in arrays if isinstance(row, np.ndarray)), np.empty(0, dtype="int32"))
    offsets = offsets_of([len(row) for row in arrays])
    values = np.empty((offsets[-1], *typed.shape[1:]), dtype=dtype or typed.dtype)
    code = _STRUCT_CODES.get(values.dtype.name) if values.ndim == 1 else None
    buffer = values.data.cast("B") if code and values.size else None
    for i, (row, start) in enumerate(zip(arrays, offsets.tolist(), strict=False)):
        if buffer is not None and not isinstance(row, np.ndarray):
            try:
                struct.pack_into(f"{len(row)}{code}", buffer, start * values.itemsize, *row)
                continue
            except (struct.error, OverflowError):  # floats for integers, too large, or not numbers: the slow way tells
                pass
        values[start : start + len(row)] = _exact(np.asarray(row), values, field, name_of(i))
    return Ragged(values, offsets)


def _as_array(row: Any, field: str, name: str) -> np.ndarray:
    if row is None:
        raise TrainDataError(f"{name}: {field} is None, expected one entry per token")
    if hasattr(row, "detach"):
        row = row.detach().cpu()
        row = row.float() if row.dtype.is_floating_point and row.dtype.itemsize < 4 else row  # NumPy has no bfloat16
    return np.asarray(row)


def _exact(row: np.ndarray, target: np.ndarray, field: str, name: str) -> np.ndarray:
    """Convert a row to the dtype of ``target``, whose rows it must match in shape; integers must not change."""
    if row.size == 0:
        return np.empty((0, *target.shape[1:]), dtype=target.dtype)
    if row.dtype.kind not in "biuf":
        raise TrainDataError(f"{name}: {field} must hold numbers, got {row.dtype} such as {row.flat[0]!r}")
    if row.shape[1:] != target.shape[1:]:
        raise TrainDataError(f"{name}: {field} has shape {row.shape}, in other samples it is (n, {target.shape[1:]})")
    with np.errstate(invalid="ignore", over="ignore"):
        converted: np.ndarray = row.astype(target.dtype)
    if target.dtype.kind in "iu" and not np.array_equal(converted, row):
        bad = row[converted != row].flat[0]
        raise TrainDataError(f"{name}: {field} holds {bad}, which is not a whole number that fits {target.dtype}")
    return converted
