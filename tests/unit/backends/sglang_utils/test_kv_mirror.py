"""Decoding over kept copies of keys and values, against attention of one sequence at a time over the KV pool."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from slime.backends.sglang_utils.environment import ENGINE_PLUGIN

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 8
SLOTS, CONTEXT, PLACES = 24, 600, 4000


@pytest.fixture
def kv_mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ENGINE_PLUGIN))
    from slime_engine_plugin import kv_mirror as module

    yield module
    for name in ("slime_engine_plugin", "slime_engine_plugin.kv_mirror"):
        sys.modules.pop(name, None)


class Engine:
    """A KV pool whose requests arrive, decode, are retracted and end; places and slots are used again at once."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.pool = [(self.draw(PLACES, KV_HEADS), self.draw(PLACES, KV_HEADS)) for _ in range(LAYERS)]
        self.req_to_token = torch.zeros((SLOTS, CONTEXT), dtype=torch.int32)
        self.free_slots = list(range(SLOTS))
        self.free_places = list(range(PLACES))
        self.lengths: dict[int, int] = {}

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, DIM, generator=self.torch)

    def extend(self, length: int) -> int:
        """Admit a request of ``length`` tokens: write its keys and values, and return its slot."""
        slot = self.free_slots.pop()  # the slot, and below the places, that were freed last
        self.lengths[slot] = 0
        for _ in range(length):
            self.append(slot)
        return slot

    def append(self, slot: int) -> None:
        place = self.free_places.pop()
        self.req_to_token[slot, self.lengths[slot]] = place
        self.lengths[slot] += 1
        for keys, values in self.pool:
            keys[place], values[place] = self.draw(KV_HEADS), self.draw(KV_HEADS)

    def end(self, slot: int) -> None:
        self.free_places += self.req_to_token[slot, : self.lengths.pop(slot)].tolist()
        self.free_slots.append(slot)

    def attention(self, layer: int, slot: int, query: torch.Tensor) -> torch.Tensor:
        """Of one token [heads, dim] over all of its request's, head by head in float64."""
        places = self.req_to_token[slot, : self.lengths[slot]].long()
        keys, values = (side[places].double() for side in self.pool[layer])
        output = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            weights = torch.softmax(keys[:, group] @ query[head].double() / DIM**0.5, dim=0)
            output.append(weights @ values[:, group])
        return torch.stack(output).float()


def decode(engine: Engine, mirror: object, requests: list[int]) -> float:
    """Decode one token of every request; return the largest difference to attention of one at a time."""
    for slot in requests:
        engine.append(slot)
    lengths = [engine.lengths[slot] for slot in requests]
    step = mirror.plan(requests, lengths, engine.req_to_token)
    assert step is not None
    worst = 0.0
    for layer in range(LAYERS):
        query = engine.draw(len(requests), HEADS)
        places = engine.req_to_token[requests, torch.tensor(lengths) - 1].long()
        keys, values = engine.pool[layer]
        found = mirror.attend(step, layer, query, keys[places], values[places], engine.pool[layer], None)
        expected = torch.stack([engine.attention(layer, slot, q) for slot, q in zip(requests, query, strict=True)])
        worst = max(worst, (found - expected).abs().max().item())
    return worst


@pytest.mark.parametrize("seed", range(3))
def test_random_arrivals_ends_retractions_and_growth(kv_mirror, seed: int) -> None:
    engine, mirror = Engine(seed), kv_mirror.KVMirror(1 << 20)
    choose = engine.random
    running: list[int] = []
    for _ in range(25):
        for slot in [slot for slot in running if choose.random() < 0.12]:
            running.remove(slot)
            engine.end(slot)
        while engine.free_slots and choose.random() < 0.6:
            slot = engine.extend(choose.choice([1, 5, 30, 254]))
            mirror.forget([slot])
            running.insert(choose.randrange(len(running) + 1), slot)
        if choose.random() < 0.1:
            choose.shuffle(running)
        decoded = running if choose.random() < 0.8 else running[: len(running) // 2]  # the others are decoded later
        if decoded:
            assert decode(engine, mirror, list(decoded)) < 2e-6


def test_a_request_at_the_old_places_without_an_extend_is_copied_only_if_its_places_differ(kv_mirror) -> None:
    """Requests whose keys and values came from another engine have no prefill here: only the places tell."""
    engine, mirror = Engine(0), kv_mirror.KVMirror(1 << 20)
    slots = [engine.extend(10) for _ in range(4)]
    assert decode(engine, mirror, slots) < 2e-6
    engine.end(slots[1])
    engine.extend(3)  # takes three of the places
    slot = engine.free_slots.pop()
    engine.lengths[slot] = 0
    for _ in range(11):
        engine.append(slot)
    assert decode(engine, mirror, [slots[0], slot, slots[2], slots[3]]) < 2e-6


def test_rows_stay_between_steps(kv_mirror) -> None:
    engine, mirror = Engine(1), kv_mirror.KVMirror(1 << 20)
    slots = [engine.extend(20) for _ in range(8)]
    decode(engine, mirror, slots)
    for slot in slots:
        engine.append(slot)
    step = mirror.plan(slots, [engine.lengths[slot] for slot in slots], engine.req_to_token)
    assert step.filled == []


def test_memory_is_bounded_and_given_back(kv_mirror) -> None:
    engine = Engine(2)
    row = 64 * LAYERS * 2 * KV_HEADS * DIM * 4
    mirror = kv_mirror.KVMirror(4 * 64)
    slots = [engine.extend(20) for _ in range(4)]
    decode(engine, mirror, slots)
    assert mirror.nbytes == 4 * row
    slots.append(engine.extend(20))
    for slot in slots:
        engine.append(slot)
    assert mirror.plan(slots, [engine.lengths[slot] for slot in slots], engine.req_to_token) is None
    assert mirror.nbytes == 0


def test_what_is_not_finite_stays_with_its_request(kv_mirror) -> None:
    """Rows are used again: a request of bad weights must not leave NaN behind the mask of the next."""
    engine, mirror = Engine(3), kv_mirror.KVMirror(1 << 20)
    slots = [engine.extend(60) for _ in range(4)]
    for keys, values in engine.pool:
        places = engine.req_to_token[slots[0], :60].long()
        keys[places], values[places] = float("nan"), float("nan")
    assert decode(engine, mirror, slots[1:]) < 2e-6
    for slot in slots:
        engine.append(slot)
    step = mirror.plan(slots, [engine.lengths[slot] for slot in slots], engine.req_to_token)
    for layer, (keys, values) in enumerate(engine.pool):
        places = torch.tensor([engine.req_to_token[slot, engine.lengths[slot] - 1] for slot in slots])
        mirror.attend(step, layer, engine.draw(4, HEADS), keys[places], values[places], engine.pool[layer], None)
    engine.end(slots[0])
    short = [*slots[1:], engine.extend(5)]
    mirror.forget(short[-1:])
    assert decode(engine, mirror, short) < 2e-6
