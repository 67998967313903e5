"""Copies in host memory take no more room than the allocator of pinned memory needs to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.backends.megatron_utils.state.host_copy import HostCopy, piece_sizes


def rounded(size: int) -> int:
    """As torch's allocator of pinned memory rounds it."""
    return 1 << (size - 1).bit_length()


@given(st.integers(1, 2**40))
def test_rounding_costs_less_than_a_sixteenth(nbytes: int) -> None:
    sizes = piece_sizes(nbytes)
    assert sum(sizes) == nbytes
    assert len(sizes) <= 6
    assert sum(map(rounded, sizes)) - nbytes < nbytes / 16
    assert rounded(3 * 2**30) == 4 * 2**30  # what one piece would take


def test_nothing_has_no_pieces() -> None:
    assert piece_sizes(0) == []
    empty = torch.empty(0)
    HostCopy(empty).take(empty)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (7, 13), (1000,)])
def test_every_byte_round_trips(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 100).to(dtype)
    copy, other = HostCopy(tensor), HostCopy(tensor)
    assert copy.nbytes == tensor.nbytes
    copy.take(tensor)
    other.copy_(copy)
    back = torch.zeros_like(tensor)
    other.give(back)
    assert torch.equal(back, tensor)


@pytest.mark.gpu
def test_pinned_memory_is_used_again_and_not_rounded_up() -> None:
    tensor = torch.randn(3 * 2**20 + 12345, device="cuda")
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    for _ in range(3):
        copy = HostCopy(tensor)
        copy.take(tensor)
        torch.cuda.synchronize()
        assert all(piece.is_pinned() for piece in copy.pieces)
        del copy
    taken = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    assert taken < tensor.nbytes * 1.07
