"""Sparse attention on one rank: chunks of rows, short sequences, what is chosen and what may be seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils import import_megatron

import_megatron()
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402

from slime.backends.megatron_utils.model import sparse_attention  # noqa: E402
from slime.backends.megatron_utils.model.attention import TorchCoreAttention  # noqa: E402
from slime.backends.megatron_utils.model.sparse_attention import (  # noqa: E402
    Sparse,
    SparseCoreAttention,
    local_positions,
    selected,
    selections,
)
from tests.support.megatron_checks import attention_config  # noqa: E402

TOPK, HEADS = 4, 8
SPARSE = Sparse(HEADS, 16, TOPK, interleaved=False, full=(True, False, True))
LENGTHS = [9, 4, 9, 9, 3, 30]  # neighbors of one length are computed together


class OneRank:
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def module(kind: type = SparseCoreAttention, layer: int = 1, **more: Any) -> Any:
    groups = SimpleNamespace(cp=OneRank(), tp=OneRank())
    return kind(attention_config(), layer, AttnMaskType.causal, "self", pg_collection=groups, **more)


def params(lengths: list[int]) -> PackedSeqParams:
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(total: int) -> list[torch.Tensor]:
    return [random(total, 2, width, seed=i).requires_grad_() for i, width in enumerate((8, 8, 6))]


def choose(core: SparseCoreAttention, packed: PackedSeqParams, lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """Let layer 1 choose keys by made-up scores; return queries, keys and head weights."""
    total = sum(lengths)
    q, k, w = random(total, HEADS, 16, seed=7), random(total, 1, 16, seed=8), random(total, HEADS, 1, seed=9)
    chunks = core.chunks(torch.cat([q, w], -1), k, k[..., :0], lengths)
    selections(packed)[1] = [
        None if c.k.size(1) <= TOPK else selected(c.q[..., :-1], c.k.squeeze(2), c.q[..., -1], TOPK) for c in chunks
    ]
    return q, k[:, 0], w[..., 0]


def by_definition(tensors: list[torch.Tensor], index: tuple[torch.Tensor, ...], lengths: list[int]) -> torch.Tensor:
    """Return the context token by token, in float64."""
    rows, start = [], 0
    for length in lengths:
        for t in range(length):
            q, k, w = (x.double() for x in index)
            scores = (q[start + t] @ k[start : start + t + 1].T).relu().T @ w[start + t]
            keys = start + scores.topk(min(TOPK, t + 1)).indices
            query, key, value = (x.double() for x in tensors)
            p = torch.softmax(torch.einsum("nd,knd->nk", query[start + t], key[keys]) * 8**-0.5, -1)
            rows.append(torch.einsum("nk,knd->nd", p, value[keys]))
        start += length
    return torch.stack(rows)


@pytest.mark.parametrize("scores", [2**26, 3 * HEADS * 30, 1])
def test_attention_to_the_best_keys_in_chunks_of_rows(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole sequences at once, three rows of the longest, one row: the definition, and its gradients."""
    monkeypatch.setattr(sparse_attention, "SCORES", scores)
    core, packed = module(sparse=SPARSE), params(LENGTHS)
    index = choose(core, packed, LENGTHS)
    tensors = inputs(sum(LENGTHS))
    out = core(*tensors, packed_seq_params=packed)
    assert out.shape == (sum(LENGTHS), 1, 2 * 6)
    grad = random(sum(LENGTHS), 12, seed=5)
    out.backward(grad.view_as(out))
    reference = [x.detach().clone().requires_grad_() for x in tensors]
    expected = by_definition(reference, index, LENGTHS)
    expected.backward(grad.double().view_as(expected))
    torch.testing.assert_close(out.detach().view(-1, 2, 6).double(), expected.detach(), atol=2e-6, rtol=1e-5)
    for seen, wanted in zip(tensors, reference, strict=True):
        torch.testing.assert_close(seen.grad, wanted.grad, atol=5e-6, rtol=1e-5)


def test_scores_are_never_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 4 * HEADS * 30
    monkeypatch.setattr(sparse_attention, "SCORES", limit)
    tensors = inputs(sum(LENGTHS))
    chunks = module(sparse=SPARSE).chunks(*tensors, LENGTHS)
    chosen = [c for c in chunks if c.k.size(1) > TOPK]
    assert len(chosen) > 5
    assert all(c.q.size(0) * HEADS * c.q.size(1) * c.k.size(1) <= limit for c in chosen)
    assert torch.equal(torch.cat([c.q.flatten(0, 1) for c in chunks]), tensors[0])


def test_short_sequences_are_dense_bit_for_bit() -> None:
    lengths = [4, 1, 4, 4, 3]
    sparse, dense = inputs(sum(lengths)), inputs(sum(lengths))
    grad = random(sum(lengths), 1, 12, seed=3)
    outs = []
    for core, tensors in ((module(sparse=SPARSE), sparse), (module(TorchCoreAttention), dense)):
        out = core(*tensors, packed_seq_params=params(lengths))
        out.backward(grad)
        outs.append(out)
    assert torch.equal(*outs)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(sparse, dense, strict=True))


def test_a_layer_uses_the_selection_of_its_source_whichever_was_made_last() -> None:
    assert [SPARSE.source(number) for number in (1, 2, 3)] == [1, 1, 3]
    packed, tensors = params(LENGTHS), inputs(sum(LENGTHS))
    first, second, third = (module(layer=number, sparse=SPARSE) for number in (1, 2, 3))
    choose(first, packed, LENGTHS)
    selections(packed)[3] = [None if c is None else c.flip(1) for c in selections(packed)[1]]
    outs = [core(*tensors, packed_seq_params=packed) for core in (first, second, third)]
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_a_query_never_sees_what_follows_it() -> None:
    """Scores by which the last key is the best for all."""
    query, weight = torch.ones(1, 6, HEADS, 2), torch.ones(1, 6, HEADS)
    key = torch.arange(6.0)[:, None].expand(6, 2)[None]
    chosen = selected(query, key, weight, TOPK)
    assert chosen.dtype == torch.int32
    for t in range(6):
        visible = [i for i in chosen[0, t].tolist() if i <= t]
        assert sorted(visible) == list(range(max(0, t - TOPK + 1), t + 1))


def test_positions_of_a_context_parallel_rank() -> None:
    assert local_positions(5, 0, 1).tolist() == [0, 1, 2, 3, 4]
    assert local_positions(8, 0, 2).tolist() == [0, 1, 6, 7]
    assert local_positions(8, 1, 2).tolist() == [2, 3, 4, 5]
    assert local_positions(0, 1, 2).tolist() == []


def test_only_packed_sequences_are_taken() -> None:
    with pytest.raises(ValueError, match="packed sequences only"):
        module(sparse=SPARSE)(*inputs(4))
