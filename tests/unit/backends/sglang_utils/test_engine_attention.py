"""The attention backend of CPU engines: its own cases, those it leaves to SGLang, the release of its copies."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engine_plugin import engine_plugin

HEADS, KV_HEADS, DIM, PLACES = 4, 2, 8, 200


class Pool:
    """Of one layer."""

    size, dtype, is_quantized_kv_cache = PLACES, torch.float32, False

    def __init__(self) -> None:
        self.keys, self.values = (torch.randn(PLACES + 1, KV_HEADS, DIM) for _ in range(2))

    def set_kv_buffer(self, layer: Any, location: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys[location], self.values[location] = keys, values

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values


class Stock:
    """The part of ``TorchNativeAttnBackend`` that the class uses."""

    swa_out_cache_loc = None

    def __init__(self, runner: Any) -> None:
        self.token_to_kv_pool, self.req_to_token_pool = runner.pool, runner.requests
        self.calls = 0

    def init_forward_metadata(self, batch: Any) -> None:
        pass

    def forward_decode(self, q: torch.Tensor, *args: Any) -> torch.Tensor:
        self.calls += 1
        return q

    forward_extend = forward_decode


@pytest.fixture
def attention() -> Iterator[ModuleType]:
    parallel = SimpleNamespace(pp_size=1)
    memory_pool = {"HybridLinearKVPool": type("Hybrid", (), {}), "MHATokenToKVPool": Pool}
    fakes = {
        "layers.attention.torch_native_backend": {"TorchNativeAttnBackend": Stock},
        "layers.radix_attention": {"AttentionType": SimpleNamespace(ENCODER_ONLY="encoder")},
        "mem_cache.memory_pool": {**memory_pool, "KVWriteLoc": lambda location, _window: location},
        "runtime_context": {"get_parallel": lambda: parallel, "parallel": parallel},
    }
    with engine_plugin(fakes) as load:
        yield load("cpu.attention")


def make_backend(attention: ModuleType) -> Any:
    requests = SimpleNamespace(req_to_token=1 + torch.arange(PLACES, dtype=torch.int32).view(10, 20))
    return attention.BatchedAttention(SimpleNamespace(pool=Pool(), requests=requests))


def make_layer(**fields: Any) -> SimpleNamespace:
    plain = {
        "layer_id": 0, "tp_q_head_num": HEADS, "tp_k_head_num": KV_HEADS, "tp_v_head_num": KV_HEADS, "qk_head_dim": DIM,
        "v_head_dim": DIM, "scaling": None, "is_cross_attention": False, "attn_type": "decoder",
        "sliding_window_size": -1,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **fields})


def make_batch(kind: str, lengths: list[int], new: list[int] | None = None, **fields: Any) -> SimpleNamespace:
    slots, new = range(len(lengths)), new or [1] * len(lengths)
    places = [1 + 20 * slot + k for slot in slots for k in range(lengths[slot] - new[slot], lengths[slot])]
    plain = {
        "forward_mode": SimpleNamespace(is_decode=lambda: kind == "decode", is_extend=lambda: kind == "extend"),
        "batch_size": len(lengths), "req_pool_indices": torch.tensor(slots), "rids": [str(slot) for slot in slots],
        "seq_lens": torch.tensor(lengths), "extend_seq_lens": torch.tensor(new), "encoder_lens": None,
        "extend_prefix_lens": torch.tensor(lengths) - torch.tensor(new), "out_cache_loc": torch.tensor(places),
        "spec_info": None,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **fields})


def run(backend: Any, kind: str, batch: Any, layer: Any, **types: Any) -> torch.Tensor | None:
    """Return what the backend computed itself, None where it asked SGLang."""
    tokens, before = len(batch.out_cache_loc), backend.calls
    q = torch.randn(tokens, HEADS * DIM, **types)
    k, v = (torch.randn(tokens, KV_HEADS * DIM) for _ in range(2))
    backend.init_forward_metadata(batch)
    forward = backend.forward_decode if kind == "decode" else backend.forward_extend
    output = forward(q, k.view(tokens, KV_HEADS, DIM), v.view(tokens, KV_HEADS, DIM), layer, batch)
    return None if backend.calls > before else torch.stack([output, q])


def expected(backend: Any, query: torch.Tensor, slot: int, length: int) -> torch.Tensor:
    places = backend.req_to_token_pool.req_to_token[slot, :length].long()
    keys, values = (side[places].repeat_interleave(HEADS // KV_HEADS, dim=1) for side in
                    (backend.token_to_kv_pool.keys, backend.token_to_kv_pool.values))  # fmt: skip
    weights = torch.softmax(torch.einsum("hd,lhd->hl", query.view(HEADS, DIM), keys) / DIM**0.5, dim=-1)
    return torch.einsum("hl,lhd->hd", weights, values).reshape(-1)


@pytest.mark.parametrize("limit", [PLACES, 10], ids=["copies", "gathered"])
def test_prefill_and_decode(attention, limit: int) -> None:
    backend = make_backend(attention)
    backend._mirror.limit = limit
    lengths = [3, 9, 1, 5, 9]
    found = run(backend, "extend", make_batch("extend", lengths, new=[3, 2, 1, 5, 1]), make_layer())
    assert found is not None
    row = 0
    for slot, (length, new) in enumerate(zip(lengths, [3, 2, 1, 5, 1], strict=True)):
        for k in range(length - new, length):
            assert (found[0, row] - expected(backend, found[1, row], slot, k + 1)).abs().max() < 2e-6
            row += 1
    for _ in range(3):
        lengths = [length + 1 for length in lengths]
        found = run(backend, "decode", make_batch("decode", lengths), make_layer())
        assert found is not None
        for slot, length in enumerate(lengths):
            assert (found[0, slot] - expected(backend, found[1, slot], slot, length)).abs().max() < 2e-6
    assert (backend._mirror.nbytes > 0) == (limit == PLACES)


BATCHES = {"encoder": {"encoder_lens": torch.ones(5)}, "speculation": {"spec_info": object()}, "no ids": {"rids": None}}
LAYERS = {
    "cross": {"is_cross_attention": True}, "encoder": {"attn_type": "encoder"}, "window": {"sliding_window_size": 4},
    "other value size": {"v_head_dim": 4}, "latent": {"tp_k_head_num": 1},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_what_is_not_plain_stays_with_sglang(attention, kind: str) -> None:
    for fields in BATCHES.values():
        assert run(make_backend(attention), kind, make_batch(kind, [5] * 5, **fields), make_layer()) is None
    for fields in LAYERS.values():
        assert run(make_backend(attention), kind, make_batch(kind, [5] * 5), make_layer(**fields)) is None
    assert run(make_backend(attention), kind, make_batch(kind, [5] * 5), make_layer(), dtype=torch.bfloat16) is None
    backend = make_backend(attention)
    backend.token_to_kv_pool.is_quantized_kv_cache = True
    assert run(backend, kind, make_batch(kind, [5] * 5), make_layer()) is None
    sys.modules["sglang.srt.runtime_context"].parallel.pp_size = 2
    assert run(make_backend(attention), kind, make_batch(kind, [5] * 5), make_layer()) is None
    sys.modules["sglang.srt.runtime_context"].parallel.pp_size = 1
    assert run(make_backend(attention), kind, make_batch(kind, [5] * 5), make_layer()) is not None


def test_a_few_sequences_are_decoded_by_sglang(attention) -> None:
    count = attention.MIN_DECODE_BATCH
    assert run(make_backend(attention), "decode", make_batch("decode", [5] * (count - 1)), make_layer()) is None
    assert run(make_backend(attention), "decode", make_batch("decode", [5] * count), make_layer()) is not None


def test_keys_and_values_that_come_from_another_engine_are_read_again(attention) -> None:
    """A request that was sent away and returns has its slot, its id and its places, and keys of other weights."""
    backend, lengths = make_backend(attention), [5] * 5
    run(backend, "decode", make_batch("decode", lengths), make_layer())
    pool = backend.token_to_kv_pool
    pool.keys[1:6], pool.values[1:6] = torch.randn(2, 5, KV_HEADS, DIM)
    attention.forget_transferred(None, SimpleNamespace(req_pool_indices=torch.tensor([0])))
    lengths = [length + 1 for length in lengths]
    found = run(backend, "decode", make_batch("decode", lengths), make_layer())
    assert found is not None
    for slot, length in enumerate(lengths):
        assert (found[0, slot] - expected(backend, found[1, slot], slot, length)).abs().max() < 2e-6


def test_memory_is_given_back_by_a_flush_and_after_a_while_without_work(attention, monkeypatch) -> None:
    backend = make_backend(attention)
    now = [100.0]
    monkeypatch.setattr(attention.time, "monotonic", lambda: now[0])
    for give_back in (attention.give_back, attention.give_back_when_idle):
        run(backend, "decode", make_batch("decode", [5] * 5), make_layer())
        assert backend.nbytes > 0
        attention.give_back_when_idle()
        assert backend.nbytes > 0
        now[0] += attention.IDLE_S + 1
        give_back()
        assert backend.nbytes == 0


def test_caches_of_a_cpu_engine_are_in_host_memory(attention, monkeypatch) -> None:
    """SGLang says so of none of them, and of those of a decode engine that they are a GPU's."""
    carried = importlib.import_module("slime_engine_plugin.cpu.disaggregation")
    for kinds in (None, ["VRAM", "VRAM"]):
        assert carried.in_host_memory(lambda kinds, _: kinds, kinds, 2) == ["DRAM", "DRAM"]
    monkeypatch.setattr(sys, "argv", ["launch_server"])
    carried.register()  # of a regular engine: nothing to hook
