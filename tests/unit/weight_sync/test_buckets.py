"""Buckets keep every tensor, respect the limit and describe their own bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.weight_sync.buckets import iter_buckets

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]


def tensors_of(sizes: list[tuple[int, int]]) -> list[tuple[str, torch.Tensor]]:
    return [(f"w{i}", torch.arange(n).to(DTYPES[d]).reshape(n, 1)) for i, (n, d) in enumerate(sizes)]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, len(DTYPES) - 1)), max_size=20),
    limit=st.integers(1, 300),
)
def test_buckets_partition_the_stream_within_the_limit(sizes: list[tuple[int, int]], limit: int) -> None:
    tensors = tensors_of(sizes)
    buckets = list(iter_buckets(iter(tensors), limit))
    assert sorted(n for b in buckets for n in b.names) == sorted(n for n, _ in tensors)
    assert [b.is_last for b in buckets] == [False] * (len(buckets) - 1) + [True] * bool(buckets)
    for bucket in buckets:
        assert bucket.nbytes <= limit or len(bucket.tensors) == 1


@given(sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, len(DTYPES) - 1)), min_size=1, max_size=20))
def test_slots_reconstruct_every_tensor_from_the_bytes(sizes: list[tuple[int, int]]) -> None:
    tensors = dict(tensors_of(sizes))
    (bucket,) = iter_buckets(tensors.items(), 10**9)
    flat = bucket.flatten()
    assert flat.dtype == torch.uint8
    assert flat.numel() == bucket.nbytes
    for slot in bucket.slots():
        # What the engine does: a slice, viewed as the dtype. It raises on a slot that is not aligned.
        again = flat[slot.start_idx : slot.end_idx].view(slot.dtype).reshape(slot.shape)
        assert torch.equal(again, tensors[slot.name])


def test_a_limit_that_is_not_positive_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="--update-weight-buffer-size"):
        list(iter_buckets([("w", torch.zeros(1))], 0))
