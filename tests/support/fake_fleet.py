"""An ``EngineFleet`` over engines, routers and clients that are what the test says: nothing is started."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slime.arguments.placement import EnginePlan
from slime.backends.sglang_utils.errors import RouterStartError
from slime.ray.manager.engines import fleet as engine_fleet
from slime.ray.manager.engines import health as engine_health
from slime.ray.manager.engines import lifecycle as engine_lifecycle
from slime.ray.manager.engines import members as engine_members
from slime.ray.manager.engines import served_model
from slime.ray.manager.engines.fleet import EngineFleet
from slime.ray.manager.engines.members import LIVING, Member, SlotsLostError, State
from slime.servers.http import EngineError, EngineTimeoutError, RouterError
from slime.servers.types import EngineInfo
from tests.support.standin_fleet import Events, fleet_args

PATIENCE_S = 30.0


class Engine:
    """An engine whose starts, ends and answers are what the test says. Every life has a port of its own."""

    started: list[Engine]
    planned: int
    broken_starts: list[str]
    without_slots: set[int]
    gate: threading.Event

    def __init__(self, plan: EnginePlan) -> None:
        self.plan, self.ended_by, self.is_ended = plan, None, threading.Event()
        self.started.append(self)
        self.port = len(self.started)

    def start(self) -> EngineInfo:
        if self.plan.rank in self.without_slots:
            raise SlotsLostError(f"{self.plan}: a node of its slots is gone")
        if self.port > self.planned:
            assert self.gate.wait(PATIENCE_S)
        if self.broken_starts and self.port > self.planned:
            raise RuntimeError(self.broken_starts.pop(0))
        return EngineInfo(f"http://e{self.plan.rank}:{self.port}", rank=self.plan.rank)

    def poll(self) -> str | None:
        return self.ended_by

    def last_lines(self) -> list[str]:
        return ["loading", "serving"]

    def end(self) -> None:
        self.is_ended.set()


class Router:
    host, name = "127.0.0.1", "router"

    def __init__(self, port: int = 1) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.engines: list[str] = []
        self.refuses: set[str] = set()
        self.ended_by: str | None = None
        self.stopped = False
        self.restarts = 0

    def restart(self) -> None:
        """It has forgotten its engines; a port that another process took ends it for good."""
        self.restarts += 1
        self.engines = []
        if self.ended_by != "a port that is taken":
            self.ended_by = None
            return
        raise RouterStartError("its port is taken")

    def start(self) -> None: ...
    def wait_ready(self) -> None: ...

    def add_engine(self, info: EngineInfo) -> None:
        if info.url in self.refuses:
            raise RouterError("POST", "/workers", status=500, body="full")
        self.engines.append(info.url)

    def remove_engine(self, info: EngineInfo) -> bool:
        if info.url in self.engines:
            self.engines.remove(info.url)
        return True

    def poll(self) -> str | None:
        return self.ended_by

    def stop(self) -> None:
        self.stopped = True


class Client:
    """Answers unless its URL is among the ``silent`` ones, or URL and call among those that ``hang``.

    ``answers`` has what its ``generate`` returns, by URL.
    """

    silent: set[str]
    hanging: set[tuple[str, str]]
    answers: dict[str, Any]
    calls: list[tuple[str, str]]
    info: dict[str, Any]

    @classmethod
    def of(cls, info: EngineInfo, timeout: float = 0.0) -> Client:
        return cls(info.url, info.api_key, timeout)

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 0.0) -> None:
        self.url = url

    def num_requests(self) -> int:
        return 0

    def server_info(self) -> dict[str, Any]:
        return self.info

    def generate(self, payload: dict[str, Any], timeout: float | None = None) -> Any:
        return self.answers.get(self.url, {"meta_info": {}})

    def __getattr__(self, name: str) -> Callable[..., str]:
        def call(*args: Any, **kwargs: Any) -> str:
            if (self.url, name) in self.hanging:
                raise EngineTimeoutError("POST", f"{self.url}/{name}", status=None, body="none within 600 s")
            self.calls.append((self.url, " ".join([name, *map(str, args)])))
            if self.url in self.silent:
                raise EngineError("GET", self.url, status=None, body="no reply")
            return f"{name} of {self.url}"

        return call


class World:
    def __init__(self, fleet: EngineFleet, routers: dict[str, Router], events: Events) -> None:
        self.fleet, self.routers, self.events = fleet, routers, events

    @property
    def router(self) -> Router:
        """That of the first model."""
        return self.routers[self.fleet.models[0].name]

    def member(self, rank: int) -> Member:
        return next(member for member in self.fleet.members.all() if member.rank == rank)

    def wait_for(self, rank: int, state: State) -> None:
        """The threads that replace engines are short here."""
        for _ in range(int(PATIENCE_S / 0.005)):
            if self.member(rank).state is state:
                return
            threading.Event().wait(0.005)
        raise AssertionError(f"engine {rank} is {self.member(rank).state}, not {state}")


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait until ``condition`` holds. The limit is short: threads have little to do here."""
    for _ in range(int(PATIENCE_S / 0.005)):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it did not happen")


def infos(run: World) -> list[EngineInfo]:
    """The engines that live."""
    return [member.known_info for member in run.fleet.members.of(*LIVING)]


def push(run: World) -> list[str]:
    """A push to the engines that are offered; return which."""
    offered = [info.url for info in run.fleet.offer()]
    run.fleet.admit()
    return offered


def fleet_worlds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    """Yield what makes a started fleet on ``slots``; keyword arguments replace those of the run."""
    Engine.started, Engine.broken_starts, Engine.gate = [], [], threading.Event()
    Engine.without_slots = set()
    Engine.gate.set()
    Client.silent, Client.calls, Client.info = set(), [], {}
    Client.hanging, Client.answers = set(), {}
    monkeypatch.setattr(engine_fleet, "WATCH_INTERVAL_S", 10_000.0)  # tests look for themselves
    monkeypatch.setattr(served_model, "ENDING_S", 0.3)  # a router that refuses an engine does not end
    monkeypatch.setattr(engine_lifecycle, "RETRY_DELAY_S", 0.001)
    for module in (engine_members, engine_lifecycle, engine_health):  # all that make a client
        monkeypatch.setattr(module, "EngineClient", Client)
    monkeypatch.setattr(engine_fleet, "spans_one_host", lambda: True)
    worlds: list[World] = []
    monkeypatch.setattr(
        EngineFleet,
        "_router",
        lambda self, model, host: worlds[-1].routers.setdefault(model.name, Router(1 + len(worlds[-1].routers))),
    )

    def make(slots: int = 2, **changes: Any) -> World:
        events = Events()
        args = fleet_args(slots, **{"rollout_health_check_interval": 10_000.0, **changes})
        fleet = EngineFleet(args, (None, list(range(slots)), list(range(slots))), {}, events, Engine)
        Engine.planned = len(Engine.started) + len(fleet.plans)
        worlds.append(World(fleet, {}, events))
        fleet.start()
        return worlds[-1]

    yield make
    for each in worlds:
        each.fleet.stop()
