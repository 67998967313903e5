"""Rows of different lengths as one contiguous array plus offsets: NumPy alone, the manager starts without torch."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.batching.errors import TrainDataError


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

    A list of plain numbers costs 5 to 10 ns per number. Conversions must be exact for integers: a token id beyond
    int32 or a mask of 0.5 raises TrainDataError, which names the sample (``name_of(i)``) and the field.
    """
    arrays = [
        row if isinstance(row, (list, tuple)) else _as_array(row, field, name_of(i)) for i, row in enumerate(rows)
    ]
    typed = next((row for row in arrays if isinstance(row, np.ndarray)), np.empty(0, dtype="int32"))
    offsets = offsets_of([len(row) for row in arrays])
    values = np.empty((offsets[-1], *typed.shape[1:]), dtype=dtype or typed.dtype)
    pack = _PACKERS.get(values.dtype.name) if values.ndim == 1 else None
    for i, (row, start) in enumerate(zip(arrays, offsets.tolist(), strict=False)):
        if pack is not None and len(row) and not isinstance(row, np.ndarray):
            packed = pack(row)
            if packed is not None:
                values[start : start + len(row)] = packed
                continue
        values[start : start + len(row)] = _exact(np.asarray(row), values, field, name_of(i))
    return Ragged(values, offsets)


Row = list[Any] | tuple[Any, ...]


def _pack_int8(row: Row) -> np.ndarray | None:
    """Pack through bytes, four times as fast as through anything that knows signs."""
    try:
        packed = np.frombuffer(bytes(row), dtype=np.uint8)
    except (TypeError, ValueError):
        return None
    return packed if packed.max() < 128 else None


def _pack_int32(row: Row) -> np.ndarray | None:
    """Pack through int64, twice as fast as without: Python need not look at the range of every number."""
    packed = _pack_as("q", np.int64, row)
    if packed is None or packed.min() < -(2**31) or packed.max() >= 2**31:
        return None
    return packed


def _pack_as(code: str, dtype: type[np.generic], row: Row) -> np.ndarray | None:
    try:
        return np.frombuffer(struct.pack(f"{len(row)}{code}", *row), dtype=dtype)
    except (struct.error, OverflowError):
        return None


_PACKERS: dict[str, Callable[[Row], np.ndarray | None]] = {
    "int8": _pack_int8,
    "int32": _pack_int32,
    "int64": functools.partial(_pack_as, "q", np.int64),
    "float32": functools.partial(_pack_as, "f", np.float32),
    "float64": functools.partial(_pack_as, "d", np.float64),
}
"""By dtype: the fast way from a list of plain numbers, or None for what the slow way must look at: floats for integers,
numbers out of range, things that are not numbers."""


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
