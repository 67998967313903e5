"""The rollout manager without Ray: engines that die, sleep, or get new weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from slime.arguments.placement import EnginePlan
from slime.ray.manager import rollout_manager
from slime.ray.manager.engines import control as engine_control
from slime.ray.manager.rollout_manager import RolloutManager
from slime.ray.remote import EngineDied, EnginesNeedWeights, RemoteFailure
from slime.servers.types import EngineInfo
from slime.utils import async_utils
from tests.support.rollout_manager import PATIENCE_S, trained

HERE = __name__


class FakeFleet:
    """Engines that are ready when the test says so, and that can die."""

    def __init__(self, args: Any, slots: Any, wiring: Any, events: Any) -> None:
        self.on_death, self.events = events.engines_failed, events
        self.calls: list[str] = []
        self.num_new = 0
        self.ready, self.stopped = threading.Event(), False
        self.infos = [EngineInfo(f"http://127.0.0.1:{i}", 1, i, "regular", i) for i in range(2)]
        plans = [EnginePlan(i, 4 * i, 4, 4, 1, overrides=overrides) for i, overrides in enumerate(({}, {"ep_size": 2}))]
        self.offered = [SimpleNamespace(engine=SimpleNamespace(plan=plan)) for plan in plans]
        self.error: Exception | None = None
        fleets.append(self)

    def start(self) -> None:
        assert self.ready.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error

    def offer(self) -> list[EngineInfo]:
        return self.infos

    def check_weights(self, action: str) -> list[str]:
        self.calls.append(action)
        return [f"{action} done"]

    def release_memory(self) -> None:
        self.calls.append("release")

    def resume_memory(self, tags: list[str] | None) -> None:
        self.calls.append(f"resume {tags}")

    def resume_checks(self) -> None:
        self.calls.append("resume checks")

    def pause_checks(self) -> None:
        self.calls.append("pause checks")

    def recover(self) -> int:
        self.calls.append("recover")
        return self.num_new

    def admit(self) -> None:
        self.calls.append("admit")
        self.num_new = 0

    def note_rejected(self, *_: Any) -> None: ...

    def mark_unreachable_dead(self, hanging: Any = None) -> None:
        self.calls.append("lose unreachable")

    def counts(self) -> dict[str, int]:
        return {"rollout/engines/restarted": 2}

    def stop(self) -> None:
        self.stopped = True
        self.ready.set()


fleets: list[FakeFleet] = []


@pytest.fixture
def with_engines(
    make_manager: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[RolloutManager, Any]]]:
    monkeypatch.setattr(rollout_manager, "EngineFleet", FakeFleet)
    monkeypatch.setattr(rollout_manager, "init_http_client", lambda args: None)
    fleets.clear()

    def build(**changes: Any) -> tuple[RolloutManager, FakeFleet]:
        manager = make_manager(debug_train_only=False, **changes)
        return manager, fleets[-1]

    yield build
    for fleet in fleets:
        fleet.ready.set()


def test_calls_wait_for_the_engines(with_engines: Any) -> None:
    manager, fleet = with_engines()
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(manager.get_updatable_engines)
        rollout = pool.submit(manager.generate, 0)
        assert not threading.Event().wait(0.2)
        assert not asked.done()
        assert not rollout.done()
        fleet.ready.set()
        assert asked.result(PATIENCE_S) == fleet.infos
        assert trained(rollout.result(PATIENCE_S)) == [0, 1, 2, 3]


def test_offload_and_onload_reach_the_engines(with_engines: Any) -> None:
    manager, fleet = with_engines()
    fleet.ready.set()
    manager.offload()
    manager.onload_weights()
    manager.onload_kv()
    manager.onload()
    assert manager.check_weights("checksum") == ["checksum done"]
    assert fleet.calls == [
        "pause checks",
        "release",
        "resume ['weights']",
        "resume ['kv_cache', 'cuda_graph']",
        "resume None",
        "checksum",
    ]


def test_engines_that_do_not_start_fail_every_call_and_the_watch(with_engines: Any) -> None:
    manager, fleet = with_engines()
    fleet.error = RemoteFailure("EngineStartError: engine 1 exited with 1\n  | out of memory")
    with ThreadPoolExecutor(1) as pool:
        watch = pool.submit(manager.wait_for_failure)
        fleet.ready.set()
        with pytest.raises(EngineDied, match=r"engine 1 exited with 1\n  \| out of memory"):
            watch.result(PATIENCE_S)
    for call in (manager.get_updatable_engines, lambda: manager.generate(0), manager.offload, lambda: manager.eval(0)):
        with pytest.raises(EngineDied, match="engine 1 exited"):
            call()


def test_an_engine_that_dies_ends_the_rollout_in_progress(with_engines: Any) -> None:
    manager, fleet = with_engines(rollout_function_path=f"{HERE}.generate_for_ever")
    fleet.ready.set()
    with ThreadPoolExecutor(2) as pool:
        rollout = pool.submit(manager.generate, 0)
        watch = pool.submit(manager.wait_for_failure)
        try:
            assert asking.wait(PATIENCE_S)
        finally:  # the pool waits for both
            fleet.on_death(EngineDied("engine 0 exited with -9"))
        for waiting in (rollout, watch):
            with pytest.raises(EngineDied, match="engine 0 exited with -9"):
                waiting.result(PATIENCE_S)
    with pytest.raises(EngineDied, match="engine 0 exited with -9"):
        manager.generate(1)


def test_an_engine_that_dies_before_the_rollout_waits_for_anything_ends_it_all_the_same(with_engines: Any) -> None:
    manager, fleet = with_engines(rollout_function_path=f"{HERE}.generate_in_two_steps")
    fleet.ready.set()
    with ThreadPoolExecutor(1) as pool:
        rollout = pool.submit(manager.generate, 0)
        try:
            assert thinking.wait(PATIENCE_S)
        finally:
            fleet.on_death(EngineDied("engine 0 exited with -9"))
            thought.set()
        with pytest.raises(EngineDied, match="engine 0 exited with -9"):
            rollout.result(PATIENCE_S)


thinking, thought = threading.Event(), threading.Event()


def generate_in_two_steps(args: Any, rollout_id: int, source: Any, evaluation: bool = False) -> Any:
    """The first waits for nothing that can be interrupted."""
    thinking.set()
    assert thought.wait(PATIENCE_S)
    return generate_for_ever(args, rollout_id, source, evaluation)


asking = threading.Event()


def generate_for_ever(args: Any, rollout_id: int, source: Any, evaluation: bool = False) -> Any:
    async def ask() -> None:
        import asyncio

        asking.set()
        await asyncio.sleep(3 * PATIENCE_S)

    return async_utils.run(ask())


def test_rollouts_and_evaluations_are_checked_and_offloaded_engines_are_not(with_engines: Any) -> None:
    manager, fleet = with_engines()
    fleet.ready.set()
    manager.generate(0)
    manager.offload()
    manager.eval(0)
    manager.health_monitoring_pause()
    manager.health_monitoring_resume()
    checks = [call for call in fleet.calls if call.endswith("checks")]
    assert checks == ["resume checks", "pause checks"] * 2 + ["resume checks"]
    assert {r["name"]: r["value"] for r in manager.drain_records()}["rollout/engines/restarted"] == 2


def test_a_push_of_weights_has_a_beginning_and_an_end(with_engines: Any) -> None:
    manager, fleet = with_engines(sglang_pp_size=2, rollout_num_gpus_per_engine=4)
    fleet.ready.set()
    fleet.num_new = 1
    assert manager.recover_updatable_engines() == 1
    assert manager.get_updatable_engines() == fleet.infos
    manager.mark_unreachable_engines_dead()
    manager.clear_updatable_num_new_engines()
    assert fleet.calls == ["recover", "lose unreachable", "admit"]


def test_what_trainers_of_old_ask_for_before_a_push(with_engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, fleet = with_engines(sglang_pp_size=2, rollout_num_gpus_per_engine=4)
    fleet.ready.set()
    fleet.num_new = 1
    locks: list[Any] = []

    def start(kind: Any) -> Any:
        def make_manager() -> Any:
            locks.append(kind())
            return locks[-1]

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make_manager))

    monkeypatch.setattr(engine_control, "ray", SimpleNamespace(remote=start))
    engines, lock, num_new, gpus, offsets, sizes = manager.get_updatable_engines_and_lock()
    assert engines == fleet.infos
    assert (num_new, gpus, offsets) == (1, [1, 1], [0, 1])
    assert sizes == [{"tp_size": 2, "pp_size": 2, "ep_size": size} for size in (1, 2)]
    assert lock.acquire()
    assert not lock.acquire()
    lock.release()
    assert lock.acquire()
    manager.get_updatable_engines_and_lock()
    assert len(locks) == 1


def test_the_need_of_weights_is_reported_until_engines_serve(with_engines: Any) -> None:
    manager, fleet = with_engines()
    fleet.ready.set()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(manager.wait_until_weights_needed)
        assert not manager.needs_weights()
        fleet.events.engines_need_weights()
        with pytest.raises(EnginesNeedWeights):
            waiting.result(PATIENCE_S)
        assert manager.needs_weights()
        manager.recover_updatable_engines()
        manager.clear_updatable_num_new_engines()
        assert not manager.needs_weights()
        waiting = pool.submit(manager.wait_until_weights_needed)
        manager.dispose()
        assert waiting.result(PATIENCE_S) is None
        assert not manager.needs_weights()


def test_a_run_without_engines_has_nothing_to_check_or_recover(make_manager: Any) -> None:
    manager = make_manager()
    assert manager.recover_updatable_engines() == 0
    assert manager.get_updatable_engines() == []
    manager.mark_unreachable_engines_dead()
    manager.clear_updatable_num_new_engines()
    manager.health_monitoring_pause()
    manager.health_monitoring_resume()


def test_the_watch_ends_peacefully_with_the_run(with_engines: Any) -> None:
    manager, fleet = with_engines()
    fleet.ready.set()
    with ThreadPoolExecutor(1) as pool:
        watch = pool.submit(manager.wait_for_failure)
        manager.dispose()
        assert watch.result(PATIENCE_S) is None
    assert fleet.stopped
