"""Plans of where the elements of Hugging Face tensors go in the memory of one engine rank.

The trainer's tensors are numbered, and a rank's plan is a list of pieces of them. A piece knows nothing of addresses:
ranks that are laid out alike have equal ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch


class Piece(NamedTuple):
    """A block of elements of one tensor, in the order in which they lie in the memory of one parameter.

    Attributes:
        tensor: number of the tensor.
        parameter: the engine's name.
        shape: of the block; dimensions of one element are left out, and those that can be seen as one are joined.
        source: strides in the tensor, in elements; 0 where an element goes to several places.
        source_start: the block's first element in the tensor.
        target: strides in the parameter's memory, in elements, descending.
        target_start: the block's first element there.
    """

    tensor: int
    parameter: str
    shape: tuple[int, ...]
    source: tuple[int, ...]
    source_start: int
    target: tuple[int, ...]
    target_start: int

    @classmethod
    def of_copy(cls, tensor: int, parameter: str, target: torch.Tensor, source: torch.Tensor) -> Piece:
        """Return what ``target.copy_(source)`` copies: views of the parameter's memory and of the tensor."""
        source = source.expand(target.shape)
        dims = [
            (place, size, stride)
            for size, place, stride in zip(target.shape, target.stride(), source.stride(), strict=True)
            if size > 1
        ]
        joined: list[tuple[int, int, int]] = []
        for place, size, stride in sorted(dims, key=lambda dim: -dim[0]):
            if joined and joined[-1][0] == size * place and joined[-1][2] == size * stride:
                joined[-1] = (place, size * joined[-1][1], stride)
            else:
                joined.append((place, size, stride))
        places, shape, strides = zip(*joined, strict=True) if joined else ((), (), ())
        first, start = int(source.storage_offset()), int(target.storage_offset())
        return cls(tensor, parameter, shape, strides, first, places, start)

    @classmethod
    def of_json(cls, fields: Sequence[Any]) -> Piece:
        """Return the piece that JSON has made a list of."""
        return cls._make(tuple(field) if isinstance(field, list) else field for field in fields)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def pack(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the elements of ``tensor``, contiguous and of full shape, as the parameter of ``dtype`` has them.

        uint8 [numel * bytes of an element].
        """
        whole = tensor.detach().contiguous()
        block = whole.as_strided(self.shape, self.source, whole.storage_offset() + self.source_start)
        return as_bytes(block.to(dtype))

    def unpack(self, memory: torch.Tensor) -> torch.Tensor:
        """Return what ``memory``, any view of the parameter's memory, holds of this piece: uint8, as ``pack`` does."""
        return as_bytes(memory.as_strided(self.shape, self.target, self.target_start))

    def runs(self, itemsize: int) -> Iterator[tuple[int, int]]:
        """Yield ``(first byte in the parameter's memory, bytes)`` of what lies together, in the order of ``pack``."""
        outer, run = len(self.shape), 1
        while outer and self.target[outer - 1] == run:
            outer -= 1
            run *= self.shape[outer]
        for index in itertools.product(*(range(size) for size in self.shape[:outer])):
            start = self.target_start + sum(i * stride for i, stride in zip(index, self.target, strict=False))
            yield start * itemsize, run * itemsize


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in order as uint8, on the host."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
