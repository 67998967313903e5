"""The conditions under which an engine counts as failed; pauses do not count."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slime.ray.manager.engines.health import EngineHealth, HealthLimits, HealthMonitor

PATIENCE_S = 30.0
FOREVER = 10_000.0


def limits(**changes: float) -> HealthLimits:
    return HealthLimits(**{"interval": 10.0, "failures": 3, "first_wait": 0.0, "grace": 100.0, **changes})  # type: ignore[arg-type]


def test_so_many_failures_in_a_row_make_a_failed_engine_and_no_fewer() -> None:
    health = EngineHealth(limits(), now=0.0)
    assert not health.record(None, 1.0)
    assert [health.record("late", 2.0), health.record("late", 3.0)] == [False, False]
    assert not health.record(None, 4.0)  # it answers again: the count starts again
    assert [health.record("late", 5.0) for _ in range(3)] == [False, False, True]


def test_an_engine_that_has_not_answered_yet_has_its_grace() -> None:
    health = EngineHealth(limits(grace=100.0), now=50.0)
    assert [health.record("compiling", now) for now in (60.0, 90.0, 120.0, 149.0)] == [False] * 4
    assert [health.record("compiling", now) for now in (151.0, 152.0, 153.0)] == [False, False, True]


def test_grace_ends_with_the_first_answer() -> None:
    health = EngineHealth(limits(grace=1000.0), now=0.0)
    health.record(None, 1.0)
    assert [health.record("late", 2.0) for _ in range(3)] == [False, False, True]


class Probes:
    """Results of the probe of each engine, and the engines that were reported."""

    def __init__(self, *engines: str) -> None:
        self.engines = list(engines)
        self.errors: dict[str, str] = {}
        self.failed: list[tuple[str, str]] = []
        self.count = 0
        self.probed, self.hold, self.has_failed = threading.Event(), threading.Event(), threading.Event()
        self.hold.set()

    def probe(self, engine: str) -> str | None:
        self.count += 1
        self.probed.set()
        assert self.hold.wait(PATIENCE_S)
        return self.errors.get(engine)

    def fail(self, engine: str, reason: str) -> None:
        self.failed.append((engine, reason))
        self.engines.remove(engine)
        self.has_failed.set()


@pytest.fixture
def monitor_of() -> Iterator[Callable[..., HealthMonitor[str]]]:
    monitors: list[HealthMonitor[Any]] = []

    def make(probes: Probes, **changes: float) -> HealthMonitor[str]:
        monitors.append(
            HealthMonitor(limits(**{"interval": FOREVER, **changes}), lambda: probes.engines, probes.probe, probes.fail)
        )
        return monitors[-1]

    yield make
    for monitor in monitors:
        monitor.stop()


def test_only_the_engine_that_fails_is_reported_and_once(monitor_of: Any) -> None:
    probes = Probes("a", "b")
    monitor = monitor_of(probes)
    monitor.resume()
    monitor.check()
    probes.errors["b"] = "no reply within 30 s"
    for _ in range(2):
        monitor.check()
        assert probes.failed == []
    for _ in range(3):
        monitor.check()
    assert probes.failed == [("b", "3 health checks in a row failed, the last: no reply within 30 s")]


def test_failures_before_a_pause_do_not_count_after_it(monitor_of: Any) -> None:
    probes = Probes("a")
    monitor = monitor_of(probes)
    monitor.resume()
    monitor.check()
    probes.errors["a"] = "late"
    monitor.check()
    monitor.check()
    monitor.pause("taking weights")
    monitor.resume("taking weights")
    monitor.check()
    monitor.check()
    assert probes.failed == []
    monitor.check()
    assert len(probes.failed) == 1


def test_a_probe_that_a_pause_overtakes_does_not_count(monitor_of: Any) -> None:
    probes = Probes("a")
    monitor = monitor_of(probes)
    monitor.resume()
    monitor.check()
    probes.errors["a"] = "paused for new weights"
    monitor.check()
    monitor.check()
    probes.hold.clear()
    probes.probed.clear()
    last = threading.Thread(target=monitor.check)
    last.start()
    assert probes.probed.wait(PATIENCE_S)
    monitor.pause()
    probes.hold.set()
    last.join(PATIENCE_S)
    assert probes.failed == []


def test_it_runs_while_there_is_no_reason_to_pause(monitor_of: Any) -> None:
    probes = Probes("a")
    monitor = monitor_of(probes, interval=0.001)
    assert not monitor.is_active  # nothing is asked of the engines yet
    monitor.pause("taking weights")
    monitor.resume()
    assert not monitor.is_active
    assert probes.count == 0
    monitor.resume("taking weights")
    assert monitor.is_active
    assert probes.probed.wait(PATIENCE_S)
    probes.errors["a"] = "hangs"
    assert probes.has_failed.wait(PATIENCE_S)
    assert probes.failed[0][0] == "a"


def test_a_first_wait_puts_off_the_first_round(monitor_of: Any) -> None:
    probes = Probes("a")
    monitor = monitor_of(probes, interval=0.001, first_wait=FOREVER)
    monitor.resume()
    assert not probes.probed.wait(0.2)
    monitor.pause()
    monitor.limits = limits(interval=0.001)
    monitor.resume()
    assert probes.probed.wait(PATIENCE_S)
