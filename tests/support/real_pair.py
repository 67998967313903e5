"""Real engines and the real router under an ``EngineFleet``, without Ray."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.arguments.placement import EnginePlan
from slime.backends.sglang_utils.engine import EngineProcess
from slime.ray.manager.engines import fleet as engine_fleet
from slime.ray.manager.engines import served_model
from slime.ray.manager.engines.fleet import EngineFleet
from slime.servers.types import EngineInfo
from tests.support.engines import engine_values
from tests.support.standin_fleet import Events, fleet_args


class OwnEngine:
    """A SGLang process as a child of this one."""

    def __init__(self, args: Namespace, plan: EnginePlan, log_path: Path) -> None:
        self.plan = plan
        self.process = EngineProcess(args, rank=plan.rank, host="127.0.0.1", log_path=log_path)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def start(self) -> EngineInfo:
        self.process.start()
        self.process.wait_ready()
        return self.process.info

    def poll(self) -> str | None:
        return self.process.poll()

    def last_lines(self) -> list[str]:
        return self.process.last_lines()

    def end(self) -> None:
        self.process.stop()


@contextlib.contextmanager
def real_fleet(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, root: Path, engines: int, **changes: object
) -> Iterator[tuple[EngineFleet, Events]]:
    """Yield a started fleet of ``engines`` SGLang processes behind a router of its own; logs are in ``root``."""
    monkeypatch.setattr(engine_fleet, "WATCH_INTERVAL_S", 0.5)
    monkeypatch.setattr(engine_fleet, "spans_one_host", lambda: True)
    monkeypatch.setattr(served_model, "log_path", lambda args, name: root / f"{name}.log")
    # A real engine on a busy machine may take more than the second that stand-ins are given.
    changes = {"rollout_health_check_timeout": 30.0, **changes}
    args = fleet_args(engines, **{**changes, **engine_values(checkpoint)})
    slots = (None, list(range(engines)), list(range(engines)))
    events = Events()
    fleet = EngineFleet(args, slots, {}, events, lambda p: OwnEngine(args, p, root / f"engine_{p.rank}.log"))
    try:
        fleet.start()
        yield fleet, events
    finally:
        fleet.stop()
