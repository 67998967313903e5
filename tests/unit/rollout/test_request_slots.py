"""The limit of requests in flight: a semaphore that can be resized, and the rule that resizes it."""

from __future__ import annotations

import asyncio
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from slime.rollout.requests import request_slots
from slime.rollout.requests.engines import ASKED_AT_ONCE, SHORTEST_QUEUE, EngineLoad, EngineLoads
from slime.rollout.requests.request_slots import RequestSlots, next_limit
from slime.servers import http_utils
from slime.servers.http_client import HttpClient
from tests.support.standin import Failure, StandInCluster
from tests.support.virtual_time import run_virtually


class Loads(EngineLoads):
    """Engines that report what the test says."""

    def __init__(self, *loads: EngineLoad, listed: int | None = None) -> None:
        super().__init__(lambda: "")
        self.loads, self.listed, self.reads = list(loads), listed or len(loads), 0

    async def read(self) -> list[EngineLoad]:
        self.reads += 1
        return self.loads


@pytest.fixture
async def client(monkeypatch):
    made = HttpClient(8)
    monkeypatch.setattr(http_utils, "_http_client", made)
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("loads", "refused", "short", "expected"),
    [
        ([EngineLoad(32, 8)], 0, True, 100),  # as it should be
        ([EngineLoad(32, 68)], 0, True, 40),  # 60 too many wait
        ([EngineLoad(32, 68)], 0, False, 40),
        ([EngineLoad(32, 5)], 0, True, 103),
        ([EngineLoad(32, 5)], 0, False, 100),  # no one wants more
        ([EngineLoad(32, 0)], 0, True, 132),  # it might be idle: as many again
        ([EngineLoad(1, 0)], 0, True, 100 + SHORTEST_QUEUE),
        ([EngineLoad(100, 20)], 0, True, 105),  # a quarter of what runs
        ([EngineLoad(0, 100)], 0, True, 100),  # paused: nothing is known
        ([EngineLoad(32, 68), EngineLoad(32, 18)], 0, True, 80),  # the shortest queue counts, at every engine
        ([EngineLoad(32, 68), EngineLoad(32, 0)], 0, True, 164),
        ([EngineLoad(32, 8)], 30, True, 70),  # turned away: so many fewer
        ([EngineLoad(32, 0)], 30, True, 70),
        ([EngineLoad(32, 68)], 70, True, 30),
        ([EngineLoad(1, 500), EngineLoad(1, 500)], 0, True, 2),  # never below one per engine
        ([EngineLoad(500, 0)], 0, True, 512),  # never above the most
    ],
)
def test_the_next_limit(loads, refused, short, expected):
    assert next_limit(100, 512, 100, loads, refused=refused, short=short) == expected


def test_the_rule_does_not_count_the_same_surplus_twice():
    """Until the engine has worked it off, a second look at what is left of it changes nothing."""
    limit, in_flight = 100, 100
    for done in range(0, 61, 10):
        load = EngineLoad(32, 68 - done)
        limit = next_limit(limit, 512, in_flight - done, [load], refused=0, short=True)
        assert limit == 40


async def test_a_raised_limit_lets_those_in_who_wait_and_a_lowered_one_does_not():
    slots = RequestSlots(2)
    for _ in range(2):
        await slots.acquire()
    waiting = [asyncio.create_task(slots.acquire()) for _ in range(4)]
    await asyncio.sleep(0)
    assert (slots.in_flight, slots.waiting) == (2, 4)
    slots.resize(3)
    await asyncio.sleep(0)
    assert (slots.in_flight, slots.waiting) == (3, 3)
    slots.resize(1)
    for left in (2, 1):
        slots.release()
        await asyncio.sleep(0)
        assert (slots.in_flight, slots.waiting) == (left, 3)
    slots.release()
    await asyncio.sleep(0)
    assert (slots.in_flight, slots.waiting) == (1, 2)
    slots.resize(3)
    await asyncio.gather(*waiting)
    assert (slots.in_flight, slots.waiting) == (3, 0)


async def test_the_limit_holds_whatever_happens():
    """Seeded random requests, cancellations and limits: none is let in above the limit of that moment, and in the end
    every slot is there."""
    rng = random.Random(0)
    slots = RequestSlots(5)
    let_in: list[tuple[int, int]] = []

    async def request() -> None:
        async with slots:
            let_in.append((slots.in_flight, slots.limit))
            for _ in range(rng.randrange(5)):
                await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    for _ in range(2000):
        action = rng.random()
        if action < 0.6:
            tasks.append(asyncio.create_task(request()))
        elif action < 0.75 and tasks:
            rng.choice(tasks[-20:]).cancel()
        elif action < 0.9:
            slots.resize(rng.randint(1, 9))
        await asyncio.sleep(0)
    slots.resize(4)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(let_in) > 800
    assert all(in_flight <= limit + 1 for in_flight, limit in let_in)  # + 1: let in before, begun after it was lowered
    assert (slots.in_flight, slots.waiting, slots._value, slots._over) == (0, 0, 4, 0)


async def test_the_mean_in_flight_is_over_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(request_slots, "time", SimpleNamespace(monotonic=lambda: now[0]))
    slots = RequestSlots(4)
    now[0] += 50
    slots.count_anew()
    await slots.acquire()
    now[0] += 1
    await slots.acquire()
    now[0] += 2
    slots.release()
    now[0] += 1
    slots.resize(3)
    assert slots.metrics() == {"rollout/requests/limit": 3, "rollout/requests/in_flight_mean": (1 + 2 * 2 + 1) / 4}
    slots.release()


async def test_every_change_of_the_slots_is_reported():
    slots, seen = RequestSlots(1), []
    slots.changed = lambda: seen.append((slots.in_flight, slots.waiting))
    async with slots:
        other = asyncio.create_task(slots.acquire())
        await asyncio.sleep(0)
        other.cancel()
        await asyncio.wait([other])
    assert seen == [(1, 0), (1, 0), (0, 0)]


async def test_engines_that_do_not_answer_are_not_counted_on(client):
    slots = RequestSlots(100, Loads(EngineLoad(4, 0), EngineLoad(4, 0), listed=4))
    await slots.follow()
    assert slots.limit == 50
    slots._engines.loads = []  # type: ignore[union-attr]
    await slots.follow()
    assert slots.limit == 50, "nothing is known when none answers"
    slots._engines.loads = [EngineLoad(0, 0)] * 4  # type: ignore[union-attr]
    for _ in range(50):
        await slots.acquire()
    more = [asyncio.create_task(slots.acquire()) for _ in range(50)]
    await asyncio.sleep(0)
    while slots.waiting:
        await slots.follow()
        await asyncio.sleep(0)
    assert slots.limit == 100
    await asyncio.gather(*more)
    for _ in range(100):
        slots.release()


async def test_refusals_lower_the_limit_and_are_logged_once(client, caplog):
    slots = RequestSlots(10, Loads(EngineLoad(4, 3)))
    for _ in range(10):
        await slots.acquire()
    client.refused = 3
    await slots.follow()
    assert slots.limit == 7
    await slots.follow()
    assert slots.limit == 7
    assert [record.getMessage() for record in caplog.records] == [
        "the engines refuse 3 of 10 requests, which are sent again: from now on at most 7 are in flight"
    ]
    for _ in range(10):
        slots.release()


async def test_loads_are_those_the_engines_report(client):
    with StandInCluster(2, slots=3, delay=60.0) as cluster:
        posts = [
            asyncio.create_task(client.post(f"{url}/generate", {"input_ids": [97]}))
            for url in [cluster.engines[0].url] * 5 + [cluster.engines[1].url]
        ]
        while [len(engine.running) for engine in cluster.engines] != [5, 1]:
            await asyncio.sleep(0.001)
        engines = EngineLoads(lambda: cluster.router.url)
        assert await engines.read() == [EngineLoad(3, 2), EngineLoad(1, 0)]
        cluster.kill_engine(1, unregister=False)
        assert await engines.read() == [EngineLoad(3, 2)]
        assert engines.listed == 2
        for post in posts:
            post.cancel()
        await asyncio.wait(posts)
        await client.drain_aborts()


async def test_many_engines_are_asked_a_few_at_a_time(client, monkeypatch):
    asked, most = 0, 0

    async def load_of(self, url):
        nonlocal asked, most
        asked, most = asked + 1, max(most, asked + 1)
        await asyncio.sleep(0.001)
        asked -= 1
        return EngineLoad(int(url), 0)

    async def list_workers(url, *worker_types):
        return [str(number) for number in range(200)]

    monkeypatch.setattr(EngineLoads, "_load_of", load_of)
    monkeypatch.setattr(client, "list_workers", list_workers)
    loads = await EngineLoads(lambda: "").read()
    assert [load.running for load in loads] == list(range(200))
    assert most == ASKED_AT_ONCE


@pytest.mark.parametrize(("engines", "looks"), [(1, 59), (50, 59), (1000, 2)])
def test_the_more_engines_there_are_the_less_often_they_are_asked(no_client, engines, looks):
    async def hold_a_slot() -> int:
        loads = Loads(EngineLoad(1, 8), listed=engines)
        slots = RequestSlots(1, loads)
        async with slots:
            waiter = asyncio.create_task(slots.acquire())
            await asyncio.sleep(59.5)
        await waiter
        slots.release()
        return loads.reads

    assert run_virtually(hold_a_slot()) == looks


async def test_an_engine_that_was_replaced_is_not_missed(client):
    """The router still has it on its list beside its successor, and then drops it."""
    with StandInCluster(2) as cluster:
        engines = EngineLoads(lambda: cluster.router.url, planned=1)
        slots = RequestSlots(64, engines)
        cluster.kill_engine(1, unregister=False)
        await slots.follow()
        assert slots.limit == 64, "one engine answers, which is all there should be"
        client._workers.clear()
        cluster.router.engines.remove(cluster.engines[1])
        await slots.follow()
        assert (slots.limit, engines.listed) == (64, 1)


async def test_more_engines_than_planned_raise_nothing(client):
    with StandInCluster(3) as cluster:
        slots = RequestSlots(64, EngineLoads(lambda: cluster.router.url, planned=2))
        await slots.follow()
        for _ in range(64):
            await slots.acquire()
        more = asyncio.create_task(slots.acquire())
        await asyncio.sleep(0)
        await slots.follow()
        assert slots.limit == 64
        slots.release()
        await more
        for _ in range(64):
            slots.release()


async def test_refused_requests_are_counted_while_they_wait(client):
    with StandInCluster(1) as cluster:
        cluster.engines[0].failures.extend([Failure(503)] * 3)
        posts = [asyncio.create_task(client.post(f"{cluster.router.url}/generate", {"input_ids": [97]})) for _ in "abc"]
        while client.refused < 3:
            await asyncio.sleep(0)
        await asyncio.gather(*posts)
        assert client.refused == 0
        cluster.engines[0].failures.append(Failure(502))
        await client.post(f"{cluster.router.url}/generate", {"input_ids": [97]})


class Engine:
    """``slots`` requests at a time, the others wait in order; times are divided by ``speed``."""

    def __init__(self, slots: int, speed: float) -> None:
        self.slots, self.speed = slots, speed
        self.turns = asyncio.Semaphore(slots)
        self.held = 0
        self.idle_s, self.since = 0.0, 0.0

    def load(self) -> EngineLoad:
        running = min(self.slots, self.held)
        return EngineLoad(running, self.held - running)

    def count(self, change: int) -> None:
        now = asyncio.get_running_loop().time()
        self.idle_s += max(0, self.slots - self.held) * (now - self.since)
        self.held, self.since = self.held + change, now

    async def generate(self, seconds: float, way_s: float) -> None:
        self.count(+1)
        async with self.turns:
            await asyncio.sleep(seconds / self.speed)
        self.count(-1)
        await asyncio.sleep(way_s)


async def simulate(speeds: list[float], most: int, mean_s: float, count: int, *, adapt: bool) -> tuple[float, Any, int]:
    """Time of ``count`` requests over that of engines which never idle, the engines, the longest queue at the middle.

    A request goes to the engine that holds fewest, and takes 20 ms there and back.
    """
    rng, engines = random.Random(0), [Engine(32, speed) for speed in speeds]

    class Reports(EngineLoads):
        async def read(self) -> list[EngineLoad]:
            return [engine.load() for engine in engines]

    reports = Reports(lambda: "")
    reports.listed = len(engines)
    slots = RequestSlots(most, reports if adapt else None)
    work = [rng.lognormvariate(math.log(mean_s) - 0.32, 0.8) for _ in range(count)]
    queues = []

    async def request(number: int) -> None:
        async with slots:
            await min(engines, key=lambda engine: engine.held).generate(work[number], 0.02)
        if number == count // 2:
            queues.append(max(engine.load().waiting for engine in engines))

    await asyncio.gather(*(request(number) for number in range(count)))
    took = asyncio.get_running_loop().time()
    return took / (sum(work) / (32 * sum(speeds))), engines, queues[0]


@pytest.fixture
def no_client(monkeypatch):
    monkeypatch.setattr(http_utils, "_http_client", HttpClient(1))


def test_no_engine_runs_dry_and_no_queue_is_long(no_client):
    """Tasks of 0.2 s, 20 ms on the way: with as many requests as slots an engine is idle for a tenth of the time."""
    exact, _, _ = run_virtually(simulate([1.0], 32, 0.2, 4000, adapt=False))
    assert exact > 1.08
    took, _, queue = run_virtually(simulate([1.0], 512, 0.2, 4000, adapt=True))
    assert took < 1.03
    assert queue <= 3 * SHORTEST_QUEUE
    _, _, flooded = run_virtually(simulate([1.0], 512, 0.2, 4000, adapt=False))
    assert flooded > 400


def test_a_slow_engine_gets_less_to_do(no_client):
    """With a short queue at each, requests go to whichever engine is free; what is sent at once is divided evenly."""
    at_once, _, _ = run_virtually(simulate([1.0, 0.5], 1024, 1.0, 3000, adapt=False))
    short, _, _ = run_virtually(simulate([1.0, 0.5], 1024, 1.0, 3000, adapt=True))
    assert short < 0.97 * at_once
    assert short < 1.15


async def test_looks_at_the_engines_only_while_requests_wait_for_others(monkeypatch, client):
    monkeypatch.setattr(request_slots, "LOOK_INTERVAL_S", 0.0)
    loads = Loads(EngineLoad(1, 4))
    slots = RequestSlots(1, loads)
    await asyncio.sleep(0.01)
    assert loads.reads == 0
    async with slots:
        await asyncio.sleep(0.01)
        assert loads.reads == 0
        waiter = asyncio.create_task(slots.acquire())
        while loads.reads < 3:
            await asyncio.sleep(0)
    await waiter
    reads = loads.reads
    await asyncio.sleep(0.01)
    assert loads.reads <= reads + 1  # one may be in progress
    slots.release()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_nothing_looks_at_the_engines_once_no_request_is_in_flight(client):
    """Neither the next look that is due nor the one in progress, whose engine never answers."""
    slots, asked = RequestSlots(4, loads := Loads(EngineLoad(1, 4))), asyncio.Event()

    async def never() -> list[EngineLoad]:
        asked.set()
        await asyncio.Event().wait()
        return []

    loads.read = never  # type: ignore[method-assign]
    await slots.acquire()
    due = slots._timer
    assert due is not None
    slots.release()
    assert due.cancelled()
    await slots.acquire()
    slots._timer.cancel()
    client.refused = 1
    slots._begin_to_look()
    await asked.wait()
    look = slots._look
    slots.release()
    await asyncio.wait([look])
    assert look.cancelled()
    assert (slots._timer, slots._look) == (None, None)


async def test_a_look_that_fails_changes_nothing(monkeypatch, client, caplog):
    monkeypatch.setattr(request_slots, "LOOK_INTERVAL_S", 0.0)
    loads = Loads(EngineLoad(1, 4))
    slots = RequestSlots(1, loads)

    async def broken() -> list[EngineLoad]:
        loads.reads += 1
        raise KeyError("url")

    loads.read = broken  # type: ignore[method-assign]
    async with slots:
        waiter = asyncio.create_task(slots.acquire())
        while loads.reads < 2:
            await asyncio.sleep(0)
    await waiter
    slots.release()
    assert slots.limit == 1
    assert "the limit of requests stays at 1" in caplog.text
