"""Attention of engines on a CPU with sinks, and in layers with a window whose keys have a pool of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.dense_attention import dense_attention
from tests.support.engine_plugin import engine_plugin

HEADS, GROUPS, DIM, PLACES = 4, 2, 8, 64


@pytest.fixture
def load() -> Iterator[Callable[[str], ModuleType]]:
    fakes = {
        "mem_cache.memory_pool": {"KVWriteLoc": lambda loc, swa_loc: SimpleNamespace(loc=loc, swa_loc=swa_loc)},
    }
    with engine_plugin(fakes) as load:
        yield load


class Pool:
    """Keys and values of both pools; ``moved[i]`` is where the window's pool has what the other has at ``i``."""

    def __init__(self, in_window: bool) -> None:
        self.layers_mapping = {3: (0, in_window)}
        self.keys, self.values = (torch.randn(PLACES, GROUPS, DIM) for _ in range(2))
        self.moved = torch.randperm(PLACES)

    def translate_loc_from_full_to_swa(self, places: torch.Tensor) -> torch.Tensor:
        return self.moved[places]

    def set_kv_buffer(self, layer: object, location: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        places = location.swa_loc if self.layers_mapping[3][1] else location.loc
        self.keys[places], self.values[places] = (x.view(-1, GROUPS, DIM) for x in (k, v))

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.values


@pytest.mark.parametrize(("window", "with_sinks"), [(5, True), (5, False), (None, True)])
@pytest.mark.parametrize("decoding", [True, False])
def test_new_tokens_see_the_window_and_the_sink(
    load: Callable[[str], ModuleType], decoding: bool, window: int | None, with_sinks: bool
) -> None:
    torch.manual_seed(0)
    windows, pool = load("cpu.windows"), Pool(window is not None)
    lengths, new = [13, 4], [1, 1] if decoding else [6, 4]
    rows = torch.randperm(PLACES)[: sum(lengths)].split(lengths)
    table = torch.zeros(8, 16, dtype=torch.long)
    slots = [5, 2]
    for slot, row in zip(slots, rows, strict=True):
        table[slot, : len(row)] = row
    fresh = torch.cat([row[-n:] for row, n in zip(rows, new, strict=True)])
    q, k, v = (torch.randn(sum(new), heads * DIM) for heads in (HEADS, GROUPS, GROUPS))
    sinks = torch.randn(HEADS) if with_sinks else None
    backend = SimpleNamespace(
        use_sliding_window_kv_pool=True, token_to_kv_pool=pool, swa_out_cache_loc=pool.moved[fresh],
        req_to_token_pool=SimpleNamespace(req_to_token=table),
    )  # fmt: skip
    batch = SimpleNamespace(
        seq_lens=torch.tensor(lengths), extend_seq_lens=torch.tensor(new), req_pool_indices=torch.tensor(slots),
        out_cache_loc=fresh, forward_mode=SimpleNamespace(is_decode=lambda: decoding),
    )  # fmt: skip
    layer = SimpleNamespace(
        layer_id=3, tp_q_head_num=HEADS, qk_head_dim=DIM, scaling=DIM**-0.5,
        sliding_window_size=None if window is None else window - 1,
    )  # fmt: skip
    output = windows.attending(None, backend, q, k, v, layer, batch, sinks=sinks)
    places = torch.cat(rows) if window is None else pool.moved[torch.cat(rows)]
    queries = torch.zeros(sum(lengths), HEADS, DIM)
    is_new = torch.cat([torch.arange(length) >= length - n for length, n in zip(lengths, new, strict=True)])
    queries[is_new] = q.view(-1, HEADS, DIM)
    expected = dense_attention(queries, pool.keys[places], pool.values[places], lengths, window=window, sinks=sinks)
    torch.testing.assert_close(output.view(-1, HEADS, DIM).double(), expected[is_new], atol=2e-6, rtol=1e-5)


def test_other_layers_are_left_to_sglang(load: Callable[[str], ModuleType]) -> None:
    backend = SimpleNamespace(use_sliding_window_kv_pool=True, token_to_kv_pool=Pool(False))
    layer = SimpleNamespace(layer_id=3)
    original = "SGLang's own".split
    assert load("cpu.windows").attending(lambda *_: original(), backend, 1, 2, 3, layer, 4) == ["SGLang's", "own"]


def test_the_scale_of_gemma_s_router_is_the_one_that_was_loaded_last(load: Callable[[str], ModuleType]) -> None:
    class Router(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.root_size = torch.nn.Parameter(torch.ones(4)), torch.tensor(0.5)
            self.register_buffer("fused", torch.zeros(4))
            self.norm, self.proj = torch.nn.Identity(), lambda x: (x @ torch.ones(4, 2), None)

        def fuse_scale(self) -> None:
            self.fused.copy_(self.scale * self.root_size)

    gemma4, model = load("server.gemma4"), torch.nn.ModuleList([torch.nn.Linear(1, 1), Router()])
    model[1].scale.data.fill_(3)
    assert gemma4.scaled_again(None, model, []) is None
    assert model[1].fused.tolist() == [1.5] * 4
    torch.testing.assert_close(gemma4.routed(model[1], torch.ones(1, 4)), torch.full((1, 2), 6.0))
