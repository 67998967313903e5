"""An ``EngineFleet`` over stand-in engines in processes of their own, which tests kill, stop and count."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from slime.arguments.placement import EnginePlan
from slime.backends.sglang_utils.router import RunningRouter
from slime.ray.manager.engines import fleet as engine_fleet
from slime.ray.manager.engines import lifecycle as engine_lifecycle
from slime.ray.manager.engines.fleet import EngineFleet
from slime.ray.manager.engines.served_model import ServedModel
from slime.ray.remote import EngineDied
from slime.servers.types import EngineInfo
from tests.support.arguments import run_args
from tests.support.standin import ServerThread, StandInRouter
from tests.support.standin.wire import Listener, Request, Response

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0


class StandInEngineProcess:
    """One stand-in engine in a process; ``words`` are those of ``python -m tests.support.standin``."""

    def __init__(self, plan: EnginePlan, words: Sequence[object]) -> None:
        self.plan, self._words = plan, words
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> EngineInfo:
        command = [sys.executable, "-m", "tests.support.standin", *map(str, self._words)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        url = self._process.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"the stand-in exited with {self._process.wait(PATIENCE_S)}")
        return EngineInfo(url, rank=self.plan.rank, gpu_offset=self.plan.gpu_offset)

    def poll(self) -> str | None:
        code = self._process.poll() if self._process is not None else None
        return None if code is None else f"engine {self.plan.rank} (pid {self.pid}) was ended by signal {-code}."

    def last_lines(self) -> list[str]:
        return ["a line of its log"]

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)
            if self._process.stdout is not None:
                self._process.stdout.close()

    def send(self, signum: signal.Signals) -> None:
        os.kill(self.pid, signum)


class CountingRouter(StandInRouter):
    """A stand-in router to which engines are added, and from which they are taken.

    ``forwarded`` counts the requests sent to an engine, ``broken`` those of them whose engine broke the connection,
    ``busy`` those that are under way.
    """

    forwarded = broken = busy = 0

    async def handle(self, request: Request) -> Response:
        path = request.path.partition("?")[0]
        if request.method == "POST" and path == "/workers":
            self.engines.append(SimpleNamespace(url=orjson.loads(request.body)["url"]))  # type: ignore[arg-type]
            return Response.of_json({"status": "accepted"}, 202)
        if request.method == "DELETE" and path.startswith("/workers/"):
            url = "http://" + path.removeprefix("/workers/")
            self.engines[:] = [e for e in self.engines if e.url != url]
            return Response.of_json({"status": "accepted"}, 202)
        if path == "/workers":
            listed = [{"id": e.url.removeprefix("http://"), "url": e.url, "is_healthy": True} for e in self.engines]
            return Response.of_json({"workers": listed})
        if path != "/generate" or not self.engines:
            return await super().handle(request)
        self.forwarded += 1
        self.busy += 1
        try:
            reply = await super().handle(request)
        finally:
            self.busy -= 1
        self.broken += reply.status == 502
        return reply


class Events:
    """Writes down what the fleet tells."""

    def __init__(self) -> None:
        self.failure: EngineDied | None = None
        self.failed, self.need = threading.Event(), threading.Event()

    def engines_failed(self, failure: EngineDied) -> None:
        self.failure = failure
        self.failed.set()

    def engines_need_weights(self) -> None:
        self.need.set()


def fleet_args(engines: int, router_url: str | None = None, **changes: Any) -> Namespace:
    """Return what a fleet reads of the namespace: ``engines`` engines, short intervals."""
    host, port = router_url.removeprefix("http://").split(":") if router_url else (None, None)
    args = run_args(actor_num_gpus_per_node=1, rollout_num_gpus=engines, rollout_num_gpus_per_engine=1)
    values = {
        "device_type": "cpu",
        "engine_ready_timeout": PATIENCE_S,
        "sglang_router_ip": host,
        "sglang_router_port": int(port) if port else None,
        "rollout_health_check_interval": 0.1,
        "rollout_health_check_timeout": 1.0,
        "rollout_health_check_first_wait": 0.0,
        "rollout_health_check_failures": 3,
        **changes,
    }
    vars(args).update(values)
    return args


class StandInFleet:
    """``engines`` stand-ins, a router and the fleet over them; ``words`` are those of all, or of each model.

    Without ``router_url`` the fleet starts the router itself. ``first_words``: of an engine's first life, by rank.
    """

    def __init__(
        self,
        engines: int,
        words: Sequence[object] | Mapping[str, Sequence[object]],
        router_url: str | None,
        first_words: Mapping[int, Sequence[object]] | None = None,
        **changes: Any,
    ) -> None:
        self.args = fleet_args(engines, router_url, **changes)
        self.events = Events()
        slots = (None, list(range(engines)), list(range(engines)))

        lives: Counter[int] = Counter()

        def engine(plan: EnginePlan) -> StandInEngineProcess:
            lives[plan.rank] += 1
            if lives[plan.rank] == 1 and plan.rank in (first_words or {}):
                return StandInEngineProcess(plan, first_words[plan.rank])  # type: ignore[index]
            return StandInEngineProcess(plan, words[plan.model] if isinstance(words, Mapping) else words)

        self.fleet = EngineFleet(self.args, slots, {}, self.events, engine)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the router."""
        return self.args.sglang_router_ip, self.args.sglang_router_port

    def serving(self) -> list[StandInEngineProcess]:
        """The engines that requests are sent to."""
        members = self.fleet.members.of(engine_fleet.State.SERVING)
        return [member.engine for member in members]  # type: ignore[misc]


@contextlib.contextmanager
def standin_fleet(
    monkeypatch: pytest.MonkeyPatch, engines: int, words: Sequence[object], **changes: Any
) -> Iterator[tuple[StandInFleet, CountingRouter]]:
    """Yield a started fleet of ``engines`` stand-ins and its router. Engines that end are noticed within 50 ms."""
    _hurry(monkeypatch)
    server, router = ServerThread(), CountingRouter([])
    listener = Listener(router.handle)
    standins: StandInFleet | None = None
    try:
        standins = StandInFleet(engines, words, server.call(listener.start()), **changes)
        standins.fleet.start()
        yield standins, router
    finally:
        if standins is not None:
            standins.fleet.stop()
        server.call(listener.drop_dead())
        server.stop()


@contextlib.contextmanager
def standin_fleet_with_router(
    monkeypatch: pytest.MonkeyPatch, folder: Path, engines: int, words: Sequence[object], **changes: Any
) -> Iterator[StandInFleet]:
    """Yield a started fleet of ``engines`` stand-ins behind a real router that it has started."""
    _hurry(monkeypatch)
    standins = StandInFleet(engines, words, None, run_dir=str(folder), **changes)
    try:
        standins.fleet.start()
        yield standins
    finally:
        standins.fleet.stop()


@contextlib.contextmanager
def standin_models(
    monkeypatch: pytest.MonkeyPatch, folder: Path, models: Mapping[str, Sequence[object]], **changes: Any
) -> Iterator[tuple[StandInFleet, dict[str, CountingRouter]]]:
    """Yield a started fleet with one stand-in per model, of which the first gets weights, and the models' routers."""
    _hurry(monkeypatch)
    file = folder / "engines.yaml"
    frozen = "".join(
        f"  - {{name: {name}, update_weights: {name == next(iter(models))}, server_groups: [{{num_gpus: 1}}]}}\n"
        for name in models
    )
    file.write_text(f"sglang:\n{frozen}")
    server = ServerThread()
    routers = {name: CountingRouter([]) for name in models}
    listeners = {name: Listener(router.handle) for name, router in routers.items()}
    standins: StandInFleet | None = None
    try:
        urls = {name: server.call(listener.start()) for name, listener in listeners.items()}

        def running(fleet: EngineFleet, model: ServedModel, host: str) -> RunningRouter:
            return RunningRouter(fleet_args(1, urls[model.name]))

        monkeypatch.setattr(EngineFleet, "_router", running)
        standins = StandInFleet(len(models), models, next(iter(urls.values())), sglang_config=str(file), **changes)
        standins.fleet.start()
        yield standins, routers
    finally:
        if standins is not None:
            standins.fleet.stop()
        for listener in listeners.values():
            server.call(listener.drop_dead())
        server.stop()


def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_fleet, "WATCH_INTERVAL_S", 0.05)
    monkeypatch.setattr(engine_lifecycle, "RETRY_DELAY_S", 0.1)
    monkeypatch.setattr(engine_fleet, "spans_one_host", lambda: True)
