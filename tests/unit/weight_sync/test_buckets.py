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


@pytest.mark.parametrize("limit", range(1, 60))
def test_halves_that_an_engine_fuses_are_never_parted(limit: int) -> None:
    """As an MLA family's attention is emitted; the last layer has no latent queries."""
    names = ["o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
    stream = [(f"layers.{layer}.self_attn.{name}.weight", torch.zeros(7, 1)) for layer in range(3) for name in names]
    stream = [(n.replace("q_a_proj", "q_proj") if "layers.2" in n else n, t.to(torch.int8)) for n, t in stream]
    buckets = list(iter_buckets(iter(stream), limit))
    assert sorted(n for b in buckets for n in b.names) == sorted(n for n, _ in stream)
    for bucket in buckets:
        halves = [n for n in bucket.names if "q_a_proj" in n]
        assert all(n.replace("q_a_proj", "kv_a_proj_with_mqa") in bucket.names for n in halves)
        assert bucket.nbytes <= max(limit, 14)
        assert bucket.nbytes <= limit or len(bucket.tensors) == 1 + len(halves) <= 2


@pytest.mark.parametrize("limit", [1, 30, 1000])
def test_what_an_engine_computes_with_scales_travels_with_them(limit: int) -> None:
    names = (
        "q_proj.weight",
        "q_proj.weight_scale_inv",
        "kv_b_proj.weight",
        "kv_b_proj.weight_scale_inv",
        "o_proj.weight",
    )
    tensors = [(f"model.layers.0.self_attn.{name}", torch.zeros(20).to(torch.float8_e4m3fn)) for name in names]
    buckets = [bucket.names for bucket in iter_buckets(iter(tensors), limit)]
    assert [name for names in buckets for name in names] == [name for name, _ in tensors]
    assert any({tensors[2][0], tensors[3][0]} <= set(names) for names in buckets)


def test_a_half_without_the_other_travels_too() -> None:
    (bucket,) = iter_buckets([("layers.0.self_attn.q_a_proj.weight", torch.zeros(2)), ("w", torch.zeros(1))], 100)
    assert sorted(bucket.names) == ["layers.0.self_attn.q_a_proj.weight", "w"]


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
