"""A tensor's bytes in host memory, pinned for devices."""

from __future__ import annotations

import torch
from torch import Tensor

SLACK = 16
"""The part of a copy that may be lost to rounding is less than one in this many."""


def piece_sizes(nbytes: int) -> list[int]:
    """Return sizes that add up to ``nbytes``: powers of two, and a last one below 1 / ``SLACK`` of the whole.

    torch rounds pinned memory up to a power of two, and keeps it to hand it out again: a copy in one piece could take
    twice its size. Blocks of other sizes cannot be had: its cache tells sizes apart by their power of two alone.
    """
    sizes = []
    left = nbytes
    while left and left >= nbytes / SLACK:
        sizes.append(1 << (left.bit_length() - 1))
        left -= sizes[-1]
    return [*sizes, left] if left else sizes


class HostCopy:
    """Room for the bytes of ``like``, a contiguous tensor. Copies from and to a device are asynchronous."""

    def __init__(self, like: Tensor) -> None:
        self.nbytes = like.nbytes
        self.pieces = [
            torch.empty(size, dtype=torch.uint8, pin_memory=like.is_cuda) for size in piece_sizes(self.nbytes)
        ]

    def take(self, source: Tensor) -> None:
        """Copy ``source`` here."""
        for piece, part in zip(self.pieces, self._parts(source), strict=True):
            piece.copy_(part, non_blocking=True)

    def give(self, target: Tensor) -> None:
        """Copy what is here into ``target``."""
        for piece, part in zip(self.pieces, self._parts(target), strict=True):
            part.copy_(piece, non_blocking=True)

    def copy_(self, other: HostCopy) -> None:
        """Copy what is in ``other``, of equal size, here."""
        for piece, others in zip(self.pieces, other.pieces, strict=True):
            piece.copy_(others)

    def _parts(self, tensor: Tensor) -> tuple[Tensor, ...]:
        flat = tensor.detach().view(-1).view(torch.uint8)
        return flat.split([piece.numel() for piece in self.pieces]) if self.pieces else ()
