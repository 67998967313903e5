"""Sparse attention of CPU engines: against one query after the other, which modules know of it, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support.engine_plugin import engine_plugin

TOPK, HEADS, DIM, ROTATED, HIDDEN, RANK = 4, 16, 8, 4, 6, 5
QUERY_HEADS, LATENT, VALUE, SCALE, LENGTH = 2, 7, 5, 0.4, 14
PASSES = [  # new tokens of three requests, as (first, end): prefills, some with a prefix, and two decode steps
    [(0, 2), (0, 5), (0, 9)],
    [(2, 3), (5, 7), (9, 12)],
    [(3, 4), (7, 8), (12, 13)],
    [(4, 5), (8, 9), (13, 14)],
]
SERVED = {"disaggregation_mode": "null", "enable_hierarchical_cache": False, "speculative_algorithm": None}


class Pool:
    """Of latents, whose first numbers are the values."""

    def __init__(self) -> None:
        self.latents = torch.zeros(3 * LENGTH, 1, LATENT)

    def set_kv_buffer(self, layer: Any, location: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.latents[location] = k

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.latents

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.latents[..., :VALUE]


@pytest.fixture
def server() -> SimpleNamespace:
    torch.manual_seed(5)
    slots = torch.randperm(3 * LENGTH, dtype=torch.int32).view(3, LENGTH)
    return SimpleNamespace(pool=Pool(), requests=SimpleNamespace(req_to_token=slots), args=SERVED.copy(), pp_size=1)


@pytest.fixture
def sparse(server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    fakes = {
        "configs.model_config": {"_hf_arch": lambda config: config},
        "mem_cache.memory_pool": {"KVWriteLoc": lambda location, _window: location},
        "model_executor.forward_context": {
            "get_token_to_kv_pool": lambda: server.pool, "get_req_to_token_pool": lambda: server.requests,
        },
        "runtime_context": {
            "get_server_args": lambda: SimpleNamespace(**server.args),
            "get_parallel": lambda: SimpleNamespace(pp_size=server.pp_size),
        },
    }  # fmt: skip
    with engine_plugin(fakes) as load:
        module = load("cpu.sparse")
        monkeypatch.setattr(module, "SCORES", 2 * HEADS * LENGTH)  # two rows of the longest request at once
        yield module


def make_indexer(halves: bool) -> SimpleNamespace:
    def linear(size: int, out: int) -> Any:
        weight = torch.randn(out, size)
        return lambda x: (F.linear(x, weight), None)

    angles = torch.randn(LENGTH, ROTATED // 2)
    return SimpleNamespace(
        index_topk=TOPK, n_heads=HEADS, head_dim=DIM, keys=None, wq_b=linear(RANK, HEADS * DIM), wk=linear(HIDDEN, DIM),
        weights_proj=SimpleNamespace(weight=torch.randn(HEADS, HIDDEN)), k_norm=lambda k: k / 2 + 1, angles=angles,
        rotary_emb=SimpleNamespace(cos_sin_cache=torch.cat([angles.cos(), angles.sin()], -1), is_neox_style=halves),
    )  # fmt: skip


def rotated(x: torch.Tensor, angles: torch.Tensor, halves: bool) -> torch.Tensor:
    """Rotate ``x [..., DIM]`` as complex numbers, whose parts are half of ROTATED apart, or neighbors."""
    part = x[..., :ROTATED]
    pairs = part.unflatten(-1, (2, -1)).transpose(-1, -2) if halves else part.unflatten(-1, (-1, 2))
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag, x[..., ROTATED:]], -1)


def best(indexer: Any, x: torch.Tensor, latent: torch.Tensor, t: int) -> list[int]:
    """Return the positions that the token ``t`` of a request attends to, in order."""
    halves = indexer.rotary_emb.is_neox_style
    query = rotated(indexer.wq_b(latent[t])[0].view(HEADS, DIM), indexer.angles[t], halves)
    weight = indexer.weights_proj.weight @ x[t]
    scores = []
    for i in range(t + 1):
        key = rotated(indexer.wk(x[i])[0] / 2 + 1, indexer.angles[i], halves)
        scores.append(sum(float(weight[h] * max(query[h] @ key, torch.tensor(0.0))) for h in range(HEADS)))
    return sorted(sorted(range(t + 1), key=lambda i: -scores[i])[:TOPK])


@pytest.mark.parametrize("halves", [True, False])
def test_requests_attend_to_their_best_tokens(sparse: ModuleType, server: SimpleNamespace, halves: bool) -> None:
    indexer = make_indexer(halves)
    layer = SimpleNamespace(layer_id=0, tp_q_head_num=QUERY_HEADS, qk_head_dim=LATENT, v_head_dim=VALUE, scaling=SCALE)
    backend = SimpleNamespace(token_to_kv_pool=server.pool)
    x, latent = torch.randn(3, LENGTH, HIDDEN), torch.randn(3, LENGTH, RANK)
    q, k = torch.randn(3, LENGTH, QUERY_HEADS, LATENT), torch.randn(3, LENGTH, 1, LATENT)
    for step, spans in enumerate(PASSES):
        tokens = [(r, t) for r, (start, stop) in enumerate(spans) for t in range(start, stop)]
        request, position = (torch.tensor(numbers) for numbers in zip(*tokens, strict=True))
        batch = SimpleNamespace(
            req_pool_indices=torch.arange(3), seq_lens=torch.tensor([stop for _, stop in spans]),
            extend_seq_lens=torch.tensor([stop - start for start, stop in spans]) if step < 2 else None,
            out_cache_loc=server.requests.req_to_token[request, position].long(),
            forward_mode=SimpleNamespace(is_decode=lambda: step >= 2),  # noqa: B023  (used in this pass)
        )  # fmt: skip
        new = x[request, position], latent[request, position], position, batch, 0
        chosen = sparse.choose(indexer, *new)
        own, keys = q[request, position], k[request, position]
        out = sparse.attend(None, backend, own, keys, keys[..., :VALUE], layer, batch, True, chosen)
        for row, (r, t) in enumerate(tokens):
            seen = best(indexer, x[r], latent[r], t)
            assert sorted(i for i in chosen[row].tolist() if i >= 0) == seen
            weights = torch.softmax(q[r, t] @ k[r, seen, 0].T * SCALE, -1)
            torch.testing.assert_close(out[row].view(QUERY_HEADS, VALUE), weights @ k[r, seen, 0, :VALUE])


def test_short_requests_are_dense(sparse: ModuleType, server: SimpleNamespace) -> None:
    """Their keys are kept all the same, for the tokens that follow."""
    indexer = make_indexer(halves=True)
    batch = SimpleNamespace(seq_lens=torch.tensor([TOPK]), out_cache_loc=torch.arange(TOPK))
    x, latent = torch.randn(TOPK, HIDDEN), torch.randn(TOPK, RANK)
    assert sparse.choose(indexer, x, latent, torch.arange(TOPK), batch, 0) is None
    assert (indexer.keys[:TOPK] != 0).all()
    assert sparse.attend(lambda *args: args[1:4], None, "q", "k", "v", None, batch) == ("q", "k", "v")


def build(sparse: ModuleType, *, skip_topk: bool = False) -> bool:
    """Build an attention layer of a sparse model; return True if it has an indexer."""

    def init(attention: SimpleNamespace) -> None:
        attention.use_dsa = sparse.is_sparse(lambda config: True, "GlmMoeDsaForCausalLM")
        attention.skip_topk = skip_topk

    attention = SimpleNamespace()
    sparse.with_indexer(init, attention)
    return bool(attention.use_dsa)


def test_attention_layers_alone_are_sparse(sparse: ModuleType) -> None:
    assert build(sparse)
    assert not sparse.is_sparse(lambda config: True, "GlmMoeDsaForCausalLM")
    assert sparse.is_sparse(lambda config: True, "LongcatFlashForCausalLM")  # which is left to SGLang


@pytest.mark.parametrize(
    ("field", "value"),
    [("disaggregation_mode", "prefill"), ("enable_hierarchical_cache", True), ("speculative_algorithm", "NGRAM")],
)
def test_what_is_not_carried_is_refused(sparse: ModuleType, server: SimpleNamespace, field: str, value: object) -> None:
    server.args[field] = value
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')}; leave out the option"):
        build(sparse)


def test_stages_carry_no_selections(sparse: ModuleType, server: SimpleNamespace) -> None:
    server.pp_size = 2
    assert build(sparse)
    with pytest.raises(ValueError, match="--pp-size and layers that share selections"):
        build(sparse, skip_topk=True)
