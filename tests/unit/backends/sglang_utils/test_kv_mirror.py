"""Attention of many sequences per call on CPU engines, against one sequence at a time over the KV pool, in float64."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.support.engine_plugin import engine_plugin

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 8
SLOTS, CONTEXT, PLACES = 24, 600, 4000


@pytest.fixture
def kv_mirror() -> Iterator[ModuleType]:
    with engine_plugin() as load:
        yield load("cpu.kv_mirror")


@pytest.fixture
def prefill(kv_mirror: ModuleType) -> ModuleType:
    return importlib.import_module("slime_engine_plugin.cpu.prefill")


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
        self.ids: dict[int, str] = {}
        self.admitted = 0

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, DIM, generator=self.torch)

    def extend(self, length: int) -> int:
        """Admit a request of ``length`` tokens: write its keys and values, and return its slot."""
        slot = self.free_slots.pop()  # the slot, and below the places, that were freed last
        self.lengths[slot] = 0
        self.admitted += 1
        self.ids[slot] = f"request {self.admitted}"
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

    def requests(self, slots: list[int]) -> list[tuple[int, str]]:
        return [(slot, self.ids[slot]) for slot in slots]

    def attention(self, layer: int, slot: int, query: torch.Tensor, length: int | None = None) -> torch.Tensor:
        """Of one token [heads, dim] over the first ``length`` (default: all) of its request's, in float64."""
        places = self.req_to_token[slot, : length or self.lengths[slot]].long()
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
    step = mirror.plan(engine.requests(requests), lengths, engine.req_to_token)
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


def test_a_request_that_was_moved_is_copied(kv_mirror) -> None:
    engine, mirror = Engine(0), kv_mirror.KVMirror(1 << 20)
    slots = [engine.extend(10) for _ in range(4)]
    assert decode(engine, mirror, slots) < 2e-6
    engine.req_to_token[slots[1], 3] = engine.free_places.pop()
    assert decode(engine, mirror, slots) < 2e-6


def test_another_request_in_the_slot_at_the_places_and_of_the_length_of_an_old_one_is_copied(kv_mirror) -> None:
    """Its keys and values come from another engine: no prefill here tells that they are not the old ones."""
    engine, mirror = Engine(0), kv_mirror.KVMirror(1 << 20)
    slots = [engine.extend(10) for _ in range(4)]
    assert decode(engine, mirror, slots) < 2e-6
    old = engine.req_to_token[slots[1], :11].clone()
    engine.end(slots[1])
    engine.free_places[-11:] = engine.free_places[-11:][::-1]  # handed out in the same order again
    assert engine.extend(11) == slots[1]
    assert torch.equal(engine.req_to_token[slots[1], :11], old)
    assert decode(engine, mirror, slots) < 2e-6


def test_rows_stay_between_steps(kv_mirror) -> None:
    engine, mirror = Engine(1), kv_mirror.KVMirror(1 << 20)
    slots = [engine.extend(20) for _ in range(8)]
    decode(engine, mirror, slots)
    for slot in slots:
        engine.append(slot)
    step = mirror.plan(engine.requests(slots), [engine.lengths[slot] for slot in slots], engine.req_to_token)
    assert step.filled == []


def test_memory_is_bounded_and_given_back(kv_mirror) -> None:
    engine = Engine(2)
    position = LAYERS * 2 * KV_HEADS * DIM * 4
    mirror = kv_mirror.KVMirror(4 * 64)
    slots = [engine.extend(20) for _ in range(4)]
    assert decode(engine, mirror, slots) < 2e-6
    assert mirror.nbytes == 4 * 64 * position
    slots.append(engine.extend(20))
    assert decode(engine, mirror, slots) < 2e-6  # 8 x 64 do not fit; 5 x 51 do
    assert mirror.nbytes == 5 * 51 * position
    slots.append(engine.extend(60))
    for slot in slots:
        engine.append(slot)
    lengths = [engine.lengths[slot] for slot in slots]
    assert mirror.plan(engine.requests(slots), lengths, engine.req_to_token) is None
    assert mirror.nbytes == 0
    assert decode(engine, mirror, slots[:4]) < 2e-6
    mirror.clear()
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
    step = mirror.plan(engine.requests(slots), [engine.lengths[slot] for slot in slots], engine.req_to_token)
    for layer, (keys, values) in enumerate(engine.pool):
        places = torch.tensor([engine.req_to_token[slot, engine.lengths[slot] - 1] for slot in slots])
        mirror.attend(step, layer, engine.draw(4, HEADS), keys[places], values[places], engine.pool[layer], None)
    engine.end(slots[0])
    short = [*slots[1:], engine.extend(5)]
    mirror.forget(short[-1:])
    assert decode(engine, mirror, short) < 2e-6


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_are_gathered(kv_mirror, seed: int) -> None:
    engine, work = Engine(seed), kv_mirror.WorkBuffers()
    for count in (1, 20, 3):
        slots = [engine.extend(engine.random.choice([1, 2, 30, 255])) for _ in range(count)]
        rows = kv_mirror.GatheredRows(slots, [engine.lengths[slot] for slot in slots], engine.req_to_token)
        for layer in range(LAYERS):
            query = engine.draw(count, HEADS)
            found = rows.attend(query, engine.pool[layer], None, work)
            expected = torch.stack([engine.attention(layer, slot, q) for slot, q in zip(slots, query, strict=True)])
            assert (found - expected).abs().max() < 2e-6
        for slot in slots:
            engine.end(slot)
    assert 0 < work.nbytes <= kv_mirror.ROWS_PER_CALL * 256 * 2 * KV_HEADS * DIM * 4
    work.clear()
    assert work.nbytes == 0


def test_what_is_not_finite_stays_with_its_request_when_rows_are_gathered(kv_mirror) -> None:
    engine = Engine(3)
    slots = [engine.extend(length) for length in (60, 5, 8)]
    for side in engine.pool[0]:
        side[engine.req_to_token[slots[0], :60].long()] = float("nan")
    engine.req_to_token[slots[1:], 8:60] = engine.req_to_token[slots[0], 8:60]  # what earlier requests left there
    rows = kv_mirror.GatheredRows(slots, [60, 5, 8], engine.req_to_token)
    query = engine.draw(3, HEADS)
    found = rows.attend(query, engine.pool[0], None, kv_mirror.WorkBuffers())
    for i in (1, 2):
        assert (found[i] - engine.attention(0, slots[i], query[i])).abs().max() < 2e-6


@pytest.mark.parametrize("seed", range(4))
def test_prefill_of_all_mixtures_of_new_and_cached_tokens(kv_mirror, prefill, seed: int) -> None:
    """Alone and in groups, side by side in the batch and apart, with and without a cached prefix."""
    engine, work = Engine(seed), kv_mirror.WorkBuffers()
    shapes = [(7, 0), (7, 0), (3, 5), (1, 9), (7, 0), (3, 5), (1, 30), (4, 100), (1, 0), (1, 9), (12, 0), (12, 0)]
    if seed:
        engine.random.shuffle(shapes)
    slots = [engine.extend(cached + new) for new, cached in shapes]
    cached, new = [cached for _, cached in shapes], [new for new, _ in shapes]
    plan = prefill.Prefill(slots, cached, new, engine.req_to_token)
    for layer, (keys, values) in enumerate(engine.pool):
        query = engine.draw(sum(new), HEADS)
        where = [(slot, k) for slot, (n, c) in zip(slots, shapes, strict=True) for k in range(c, c + n)]
        places = torch.tensor([engine.req_to_token[slot, k] for slot, k in where]).long()
        found = plan.attend(query, keys[places], values[places], engine.pool[layer], None, work)
        expected = [engine.attention(layer, slot, q, k + 1) for (slot, k), q in zip(where, query, strict=True)]
        assert (found - torch.stack(expected)).abs().max() < 2e-6
