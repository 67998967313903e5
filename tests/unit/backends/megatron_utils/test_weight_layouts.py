"""Layouts against element-by-element descriptions of where Megatron wants each row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.weights.layouts import (
    ColumnParallel,
    DeltaNetRows,
    Dims,
    GateUp,
    Layout,
    QueryKeyValue,
    Replicated,
    RowParallel,
    Vocabulary,
)

DIMS = Dims(
    num_attention_heads=8, num_query_groups=4, kv_channels=3, vocab_size=10, padded_vocab_size=16, delta_net_keys=4
)
HIDDEN = 5


def _numbered(*shape: int, start: int = 0) -> torch.Tensor:
    """Return a tensor in which every element has a value of its own."""
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float32).reshape(shape)


def _sources(layout: Layout) -> list[torch.Tensor]:
    if isinstance(layout, QueryKeyValue):
        rows = [8 * 3, 4 * 3, 4 * 3]
        return [_numbered(n, HIDDEN, start=1000 * i) for i, n in enumerate(rows)]
    if isinstance(layout, GateUp):
        return [_numbered(12, HIDDEN), _numbered(12, HIDDEN, start=1000)]
    if isinstance(layout, Vocabulary):
        return [_numbered(10, HIDDEN, start=1)]
    if isinstance(layout, DeltaNetRows):
        return [_numbered(4 + 4 + 12, 1, 4)]  # the convolution: queries, keys, values
    return [_numbered(4, 8)]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize(
    "layout", [Replicated(), ColumnParallel(), RowParallel(), Vocabulary(), QueryKeyValue(), GateUp(), DeltaNetRows()]
)
def test_round_trip_and_shapes(layout: Layout, tp_size: int) -> None:
    sources = _sources(layout)
    shards = [layout.shard(sources, rank, tp_size, DIMS) for rank in range(tp_size)]
    back = layout.unshard(shards if layout.sharded else shards[:1], DIMS)
    assert len(back) == len(sources)
    for source, tensor in zip(sources, back, strict=True):
        assert torch.equal(source, tensor)
        assert tensor.is_contiguous()
    shapes = layout.hf_shapes(tuple(shards[0].shape), tp_size, DIMS)
    assert [tuple(s) for s in shapes] == [tuple(s.shape) for s in sources]


def test_a_rank_has_its_rows_of_queries_keys_and_values() -> None:
    shard = DeltaNetRows().shard([torch.arange(20)], 1, 2, DIMS)
    assert shard.tolist() == [2, 3, 6, 7, 14, 15, 16, 17, 18, 19]


class Recorder:
    """A lazy slice like safetensors': knows its shape, and records how many elements were read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.read = tensor, 0

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, key: Any) -> torch.Tensor:
        part = self.tensor[key]
        self.read += part.numel()
        return part


@pytest.mark.parametrize("layout", [ColumnParallel(), RowParallel(), QueryKeyValue(), GateUp()])
def test_a_rank_reads_only_its_part(layout: Layout) -> None:
    sources = _sources(layout)
    for rank in range(4):
        lazy = [Recorder(source) for source in sources]
        shard = layout.shard(lazy, rank, 4, DIMS)
        assert torch.equal(shard, layout.shard(sources, rank, 4, DIMS))
        assert [4 * recorder.read for recorder in lazy] == [source.numel() for source in sources]


def test_qkv_rows_lie_group_by_group() -> None:
    """Rank 1 of 2 holds groups 2 and 3; each is its two query heads, then its key head, then its value head."""
    q, k, v = _sources(QueryKeyValue())
    shard = QueryKeyValue().shard([q, k, v], 1, 2, DIMS)
    expected = []
    for group in (2, 3):
        for head in (2 * group, 2 * group + 1):
            expected += [q[3 * head + i] for i in range(3)]
        for source in (k, v):
            expected += [source[3 * group + i] for i in range(3)]
    assert torch.equal(shard, torch.stack(expected))


def test_qkv_with_fewer_groups_than_ranks() -> None:
    """With 8 ranks and 4 groups rank 5 holds the second half of group 2's rows."""
    sources = _sources(QueryKeyValue())
    whole = QueryKeyValue().shard(sources, 2, 4, DIMS)
    assert torch.equal(QueryKeyValue().shard(sources, 5, 8, DIMS), whole[6:])
    shards = [QueryKeyValue().shard(sources, rank, 8, DIMS) for rank in range(8)]
    assert all(torch.equal(a, b) for a, b in zip(QueryKeyValue().unshard(shards, DIMS), sources, strict=True))


def test_qkv_bias() -> None:
    bias = [_numbered(24), _numbered(12, start=1000), _numbered(12, start=2000)]
    assert QueryKeyValue().shard(bias, 0, 4, DIMS).tolist() == [*range(6), 1000, 1001, 1002, 2000, 2001, 2002]


def test_gate_and_up_are_interleaved_by_rank() -> None:
    gate, up = _sources(GateUp())
    assert torch.equal(GateUp().shard([gate, up], 2, 3, DIMS), torch.cat([gate[8:12], up[8:12]]))


@pytest.mark.parametrize(("rank", "real"), [(0, 4), (1, 4), (2, 2), (3, 0)])
def test_vocabulary_padding_is_zero_and_at_the_end(rank: int, real: int) -> None:
    embedding = _sources(Vocabulary())[0]
    shard = Vocabulary().shard([embedding], rank, 4, DIMS)
    assert shard.shape == (4, HIDDEN)
    assert torch.equal(shard[:real], embedding[4 * rank : 4 * rank + real])
    assert torch.count_nonzero(shard[real:]) == 0
