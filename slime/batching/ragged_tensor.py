"""Rows of different lengths as one tensor."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RaggedTensor(Sequence[Tensor]):
    """Rows with ``lengths`` one after the other in ``values`` [total, ...], and the sequence of these rows (views)."""

    values: Tensor
    lengths: list[int]

    @classmethod
    def of(cls, rows: Sequence[Tensor]) -> RaggedTensor:
        """Join ``rows``, at least one."""
        return cls(torch.cat(list(rows)), [row.size(0) for row in rows])

    @functools.cached_property
    def _rows(self) -> tuple[Tensor, ...]:
        return self.values.split(self.lengths)

    @functools.cached_property
    def _starts(self) -> list[int]:
        return list(itertools.accumulate(self.lengths, initial=0))

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._rows)

    def __getitem__(self, i: int | slice) -> Any:
        return self._rows[i]

    def take(self, positions: Sequence[int]) -> RaggedTensor:
        """Return the rows at ``positions``, in that order: a view where each follows the last, as in a micro-batch."""
        lengths = [self.lengths[i] for i in positions]
        first = positions[0] if positions else 0
        if list(positions) == list(range(first, first + len(positions))):
            start = self._starts[first]
            return RaggedTensor(self.values[start : start + sum(lengths)], lengths)
        return RaggedTensor(torch.cat([self._rows[i] for i in positions]), lengths)


def flat(column: Sequence[Tensor]) -> Tensor:
    """Return all rows of a column, one after the other: without a copy unless it is a plain list of tensors."""
    return column.values if isinstance(column, RaggedTensor) else torch.cat(list(column))


def as_lists(data: dict[str, Any]) -> None:
    """Give the columns of ``data``, in place, the form in which hooks know them: lists with one tensor per sample."""
    for name, column in data.items():
        if isinstance(column, RaggedTensor):
            data[name] = list(column)
