"""Engines that are added, drained and removed: who gets requests and weights, what is refused, what is counted."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from slime.arguments.placement import EnginePlan, spare_slots
from slime.ray.manager.engines import members as engine_members
from slime.ray.manager.engines import scaling
from slime.ray.manager.engines import slots as engine_slots
from slime.ray.manager.engines.members import EngineChangeError, State
from slime.ray.manager.engines.slots import Reservation
from slime.ray.remote import RemoteFailure
from slime.servers.http import EngineError, EngineTimeoutError
from slime.utils import run_key
from tests.support.arguments import run_args
from tests.support.fake_fleet import PATIENCE_S, Client, Engine, World, push

OLD, NEW = "http://e0:1", "http://e1:2"


class FakeReservation:
    """Slots of a cluster that has ``free`` of them."""

    free = 0
    slots = (None, [0], [0])

    pinned: bool

    def __init__(self, plan: Any, wiring: Any, *, on_this_node: bool) -> None:
        FakeReservation.pinned = on_this_node
        if FakeReservation.free == 0:
            raise EngineChangeError(f"the Ray cluster has no room for {plan}")
        FakeReservation.free -= 1

    def release(self) -> None:
        FakeReservation.free += 1


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots are free."""
    FakeReservation.free = 2
    monkeypatch.setattr(engine_slots, "Reservation", FakeReservation)
    monkeypatch.setattr(engine_members, "DRAIN_INTERVAL_S", 0.001)
    monkeypatch.setattr(engine_members, "ABORT_INTERVAL_S", 0.01)


def leave_in_background(run: World, ranks: list[int], drain_s: float = PATIENCE_S) -> Future[int]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(run.fleet.lifecycle.remove, ranks, drain_s)
    pool.shutdown(wait=False)
    return future


def ranks(run: World, *states: State) -> list[int]:
    return [member.rank for member in run.fleet.members.of(*(states or State))]


# Joining


def test_an_added_engine_gets_the_weights_of_now_before_requests(world: Any) -> None:
    run = world(1)
    assert run.fleet.lifecycle.add() == [1]
    run.wait_for(1, State.NEW)
    assert run.router.engines == [OLD]
    assert run.fleet.num_new == 1
    assert push(run) == [OLD, NEW]
    assert run.router.engines == [OLD, NEW]
    assert ranks(run, State.SERVING) == [0, 1]
    assert run.fleet.args.sglang_model_engines == {"default": 2}
    assert run.fleet.counts() == {
        "rollout/engines/serving": 2, "rollout/engines/added": 1, "rollout/engines/removed": 0
    }  # fmt: skip


def test_one_that_comes_during_a_push_waits_for_the_next(world: Any) -> None:
    run = world(1)
    run.fleet.recover()
    offered = run.fleet.offer()
    run.fleet.lifecycle.add()
    run.wait_for(1, State.NEW)
    run.fleet.admit()
    assert [info.rank for info in offered] == [0]
    assert run.router.engines == [OLD]
    assert push(run) == [OLD, NEW]


def test_without_a_trainer_it_gets_requests_when_it_generates(world: Any) -> None:
    run = world(1, debug_rollout_only=True)
    run.fleet.lifecycle.add()
    run.wait_for(1, State.SERVING)
    assert run.router.engines == [OLD, NEW]


@pytest.mark.parametrize("is_one_host", [True, False])
def test_an_added_engine_stays_on_the_host_when_servers_listen_on_loopback(
    world: Any, monkeypatch: pytest.MonkeyPatch, is_one_host: bool
) -> None:
    run = world(1)
    run.fleet.slots.loopback = is_one_host  # as decided at the start
    run.fleet.lifecycle.add()
    assert FakeReservation.pinned is is_one_host


class FakeGroup:
    def __init__(self, bundles: list[dict[str, float]], strategy: str) -> None:
        self.bundles = bundles

    def wait(self, timeout_seconds: float) -> bool:
        return not any("node:10.0.0.1" in bundle for bundle in self.bundles)  # only the other node has room


def test_a_reservation_does_not_leave_the_node_that_loopback_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"NodeID": "b", "Resources": {"CPU": 9.0, "node:10.0.0.2": 1.0}},
        {"NodeID": "a", "Resources": {"CPU": 9.0, "node:__internal_head__": 1.0, "node:10.0.0.1": 1.0}},
    ]
    monkeypatch.setattr(engine_slots.cluster.ray, "nodes", lambda: nodes)
    fake = SimpleNamespace(
        available_resources=lambda: {"CPU": 9.0},
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "a"),
    )
    removed: list[FakeGroup] = []
    monkeypatch.setattr(engine_slots, "ray", fake)
    monkeypatch.setattr(engine_slots, "placement_group", FakeGroup)
    monkeypatch.setattr(engine_slots, "remove_placement_group", removed.append)
    plan, wiring = EnginePlan(1, 0, 2, 2, 1), {"slot": {"CPU": 1.0}}
    anywhere = Reservation(plan, wiring, on_this_node=False)
    assert anywhere.slots[0].bundles == [{"CPU": 2.0}]
    with pytest.raises(EngineChangeError, match=r"needs 1 x \[CPU 2\].* listen on loopback.*--sglang-router-ip"):
        Reservation(plan, wiring, on_this_node=True)
    assert [group.bundles for group in removed] == [[{"CPU": 2.0, "node:10.0.0.1": 0.001}]]


def test_engines_leave_while_slots_are_being_reserved(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = world(2)
    asked, gate = threading.Event(), threading.Event()

    class SlowReservation(FakeReservation):
        def __init__(self, plan: Any, wiring: Any, *, on_this_node: bool) -> None:
            asked.set()
            assert gate.wait(PATIENCE_S)
            super().__init__(plan, wiring, on_this_node=on_this_node)

    monkeypatch.setattr(engine_slots, "Reservation", SlowReservation)
    pool = ThreadPoolExecutor(1)
    added = pool.submit(run.fleet.lifecycle.add)
    assert asked.wait(PATIENCE_S)
    try:
        leave_in_background(run, [1]).result(PATIENCE_S / 10)
        assert not added.done()
    finally:
        gate.set()
        pool.shutdown(wait=False)
    assert added.result(PATIENCE_S) == [2]


def test_more_than_the_cluster_or_the_bound_allows_is_refused_whole(world: Any) -> None:
    run = world(1, rollout_max_engines=4)
    with pytest.raises(EngineChangeError, match="no room for engine 3"):
        run.fleet.lifecycle.add(count=3)
    assert FakeReservation.free == 2  # the two that there was room for were given back
    assert ranks(run) == [0]
    with pytest.raises(EngineChangeError, match="1 engines; 4 more would exceed --rollout-max-engines 4"):
        run.fleet.lifecycle.add(count=4)
    assert run.fleet.lifecycle.add() == [4]  # numbers are not used again
    with pytest.raises(EngineChangeError, match="no model 'judge' is served; there are default"):
        run.fleet.lifecycle.add("judge")
    with pytest.raises(EngineChangeError, match="model default has no decode engine"):
        run.fleet.lifecycle.add(worker_type="decode")


def test_one_that_does_not_start_leaves_no_trace(world: Any, caplog: Any) -> None:
    run = world(1)
    Engine.broken_starts.append("out of memory")
    run.fleet.lifecycle.add()
    for _ in range(2000):
        if "could not be added" in caplog.text and ranks(run) == [0]:
            break
        threading.Event().wait(0.005)
    assert "engine 1 could not be added: RuntimeError: out of memory" in caplog.text
    assert ranks(run) == [0]
    assert FakeReservation.free == 2
    assert run.fleet.args.sglang_model_engines == {"default": 1}
    assert not run.events.failed.is_set()


def test_an_engine_that_shares_devices_with_the_trainer_stays(world: Any) -> None:
    run = world(2, colocate=True, offload_rollout=True)
    for change in (lambda: run.fleet.lifecycle.add(), lambda: run.fleet.lifecycle.remove([1], 0.0)):
        with pytest.raises(EngineChangeError, match=r"engine . shares devices with the trainer"):
            change()
    assert ranks(run, State.SERVING) == [0, 1]


# Leaving


def test_a_removed_engine_ends_when_it_holds_no_request_and_its_slots_are_free(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = world(2)
    left = iter([3, 1])
    monkeypatch.setattr(Client, "num_requests", lambda client: next(left, 0))
    forgotten: list[str] = []
    monkeypatch.setattr(run_key, "forget", forgotten.append)
    url = run.router.engines[0]
    assert run.fleet.lifecycle.remove([0], PATIENCE_S) == 0
    assert Engine.started[0].is_ended.is_set()
    assert forgotten == [url]
    assert run.router.engines == [NEW]
    assert ranks(run) == [1]
    assert push(run) == [NEW]
    assert not any("abort" in call for _, call in Client.calls)
    # The next one takes its place in the run's own slots.
    assert run.fleet.lifecycle.add() == [2]
    run.wait_for(2, State.NEW)
    assert Engine.started[-1].plan.gpu_offset == 0
    assert FakeReservation.free == 2
    counts = run.fleet.counts()
    assert (counts["rollout/engines/added"], counts["rollout/engines/removed"]) == (1, 1)
    assert run.fleet.members.lost == 0


def test_what_it_holds_at_the_deadline_is_aborted(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = world(2)

    def held(client: Client) -> int:
        return 0 if (client.url, "abort_all") in Client.calls else 5

    monkeypatch.setattr(Client, "num_requests", held)
    assert run.fleet.lifecycle.take_off([1], 0.02) == 5
    assert ranks(run, State.DRAINING) == [1]
    assert not Engine.started[1].is_ended.is_set()
    assert push(run) == [OLD]
    assert run.fleet.lifecycle.remove([1], 0.02) == 0
    assert Engine.started[1].is_ended.is_set()


def test_one_that_is_busy_is_not_taken_to_have_ended(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is late with its answer, or refuses one; one without connections, or without a process, holds nothing."""
    run = world(3)

    def failing(error: Exception) -> None:
        def num_requests(client: Client) -> int:
            if client.url == OLD:
                raise error
            return 0

        monkeypatch.setattr(Client, "num_requests", num_requests)

    monkeypatch.setattr(engine_members, "ABORT_DEADLINE_S", 0.02)
    late = EngineTimeoutError("GET", OLD, status=None, body="none within 30 s")
    for error, left in (
        (late, 1),
        (EngineError("GET", OLD, status=503, body="busy"), 1),
        (EngineError("GET", OLD, status=None, body="connection refused"), 0),
    ):
        failing(error)
        assert run.fleet.lifecycle.take_off([0], 0.02) == left
    failing(late)
    run.member(0).engine.ended_by = "its node is gone"
    assert run.fleet.lifecycle.take_off([0], 0.02) == 0


def test_a_second_removal_of_one_that_is_leaving_returns_when_it_has_left(world: Any) -> None:
    run = world(2)
    run.fleet.recover()
    run.fleet.offer()
    first = leave_in_background(run, [1])
    second = leave_in_background(run, [1])
    run.wait_for(1, State.DRAINING)
    threading.Event().wait(0.1)  # both wait for the push
    run.fleet.admit()
    assert (first.result(PATIENCE_S), second.result(PATIENCE_S)) == (0, 0)
    assert ranks(run) == [0]
    assert run.fleet.members.removed == 1
    assert run.fleet.lifecycle.remove([], 0.0) == 0


def test_the_last_engine_stays_and_so_do_as_many_as_the_bound_says(world: Any) -> None:
    run = world(3, rollout_min_engines=2)
    with pytest.raises(EngineChangeError, match="1 engines would be left, fewer than --rollout-min-engines 2"):
        run.fleet.lifecycle.remove([0, 1], 0.0)
    run.fleet.lifecycle.remove([0], 0.0)
    run.fleet.lifecycle.remove([1], 0.0, is_forced=True)
    with pytest.raises(EngineChangeError, match="no other regular engine of model default gets requests"):
        run.fleet.lifecycle.remove([2], 0.0, is_forced=True)
    with pytest.raises(EngineChangeError, match="there is no engine 0; there are 2"):
        run.fleet.lifecycle.remove([0], 0.0)
    assert ranks(run, State.SERVING) == [2]


def test_removal_of_the_only_one_that_serves_waits_until_the_added_one_does(world: Any) -> None:
    run = world(1)
    run.fleet.lifecycle.add()
    run.wait_for(1, State.NEW)
    with pytest.raises(EngineChangeError, match="no other regular engine"):
        run.fleet.lifecycle.remove([0], 0.0)
    push(run)
    run.fleet.lifecycle.remove([0], 0.0)
    assert run.router.engines == [NEW]


def test_one_that_is_removed_during_a_push_ends_after_it(world: Any) -> None:
    run = world(2)
    run.fleet.recover()
    assert len(run.fleet.offer()) == 2
    leaving = leave_in_background(run, [1])
    run.wait_for(1, State.DRAINING)
    assert not Engine.started[1].is_ended.wait(0.1)
    run.fleet.admit()
    leaving.result(PATIENCE_S)
    assert Engine.started[1].is_ended.is_set()
    assert run.router.engines == [OLD]
    assert push(run) == [OLD]


def test_a_push_that_takes_longer_continues_without_it(world: Any) -> None:
    """When a push fails, the trainer asks for the engines that are left, and pushes again."""
    run = world(2)
    run.fleet.recover()
    first = run.fleet.offer()
    run.fleet.lifecycle.remove([1], 0.05)
    assert Engine.started[1].is_ended.is_set()
    run.fleet.mark_unreachable_dead()
    assert [info.rank for info in first if info not in run.fleet.offer()] == [1]
    run.fleet.admit()
    assert run.router.engines == [OLD]
    assert run.fleet.members.lost == 0


def test_a_new_engine_removed_while_it_is_admitted_does_not_stay_on_the_router(world: Any) -> None:
    run = world(1)
    run.fleet.lifecycle.add()
    run.wait_for(1, State.NEW)
    added = run.router.add_engine

    def add_engine(info: Any) -> None:
        added(info)
        run.fleet.members.change(run.member(1), (State.NEW,), State.DRAINING)

    run.router.add_engine = add_engine
    push(run)
    assert run.router.engines == [OLD]
    assert ranks(run, State.DRAINING) == [1]


def test_lost_engines_may_be_removed_unless_they_are_restarted(world: Any) -> None:
    run = world(2)
    Engine.started[1].ended_by = "it ended"
    run.fleet.reap_exited()
    run.fleet.lifecycle.remove([1], 0.0)
    assert ranks(run) == [0]

    run = world(2, use_fault_tolerance=True)
    Engine.gate.clear()
    run.member(1).engine.ended_by = "it ended"  # type: ignore[attr-defined]
    run.fleet.reap_exited()
    with pytest.raises(EngineChangeError, match="engine 1 is being started"):
        run.fleet.lifecycle.remove([1], 0.0)
    Engine.gate.set()
    run.wait_for(1, State.NEW)


# Beside faults


def test_the_only_engine_dies_while_another_is_added(world: Any) -> None:
    """The one that was added serves from a push in the middle of the rollout on, whatever becomes of the lost one."""
    run = world(1, use_fault_tolerance=True)
    Engine.gate.clear()
    run.fleet.lifecycle.add()
    Engine.broken_starts += ["broken"] * 3
    lost = run.member(0)
    lost.engine.ended_by = "engine 0 was ended by signal 9"  # type: ignore[attr-defined]
    run.fleet.reap_exited()
    assert not run.events.need.is_set()
    Engine.gate.set()
    # One of four starts succeeds: that of the added engine, or the last of the lost one's.
    assert run.events.need.wait(PATIENCE_S)
    run.fleet.recover()
    assert len(push(run)) == 1
    assert len(run.router.engines) == 1
    assert not run.events.failed.is_set()


def test_neither_the_lost_nor_the_added_engine_starts(world: Any) -> None:
    run = world(1, use_fault_tolerance=True)
    Engine.gate.clear()
    run.fleet.lifecycle.add()
    Engine.broken_starts += ["broken"] * 4
    run.member(0).engine.ended_by = "engine 0 was ended by signal 9"
    run.fleet.reap_exited()
    Engine.gate.set()
    assert run.events.failed.wait(PATIENCE_S)
    assert "no engine is left" in str(run.events.failure)


# Notices and the scaling hook


def test_engines_leave_nodes_that_ray_takes_away(world: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    run = world(2, rollout_min_engines=2)
    monkeypatch.setattr(scaling.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(scaling.ray._private.state.state, "get_draining_nodes", lambda: {"b": 0}, raising=False)
    where = {0: "a", 1: "b"}
    monkeypatch.setattr(run.fleet.scaling, "on_nodes", lambda nodes: [r for r in ranks(run) if where[r] in nodes])
    watch = run.fleet.scaling
    watch.heed_notices()
    assert Engine.started[1].is_ended.wait(PATIENCE_S)
    assert "Ray takes nodes away: engines 1 leave within 60 s" in caplog.text
    for _ in range(2000):
        if ranks(run) == [0]:
            break
        threading.Event().wait(0.005)
    # Its slots go with the node, until Ray has moved them to another one.
    FakeReservation.free = 0
    stay = False
    monkeypatch.setattr(engine_slots, "slots_stay", lambda slots, plan: stay)
    with pytest.raises(EngineChangeError, match="no room"):
        run.fleet.lifecycle.add()
    stay = True
    (added,) = run.fleet.lifecycle.add()
    run.wait_for(added, State.NEW)
    assert run.member(added).engine.plan.gpu_offset == 1
    run.fleet.lifecycle.remove([added], 0.0, is_forced=True)
    where[0] = "b"
    watch.heed_notices()
    for _ in range(2000):
        if "no other regular engine" in caplog.text:
            break
        threading.Event().wait(0.005)
    assert ranks(run, State.SERVING) == [0]


WANTED: dict[str, Any] = {}


def wanted_engines(args: Any, engines: dict[str, Any]) -> Any:
    WANTED["seen"] = engines
    return WANTED["answer"]


def test_a_function_says_how_many_engines_there_are(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = world(
        1, custom_engine_scaling_path=f"{__name__}.wanted_engines", rollout_max_engines=2, engine_scaling_interval=1e6
    )
    load = {"loads": [{"num_running_reqs": 3, "num_waiting_reqs": 4}]}
    monkeypatch.setattr(Client, "loads", lambda client, timeout: load, raising=False)
    watch = run.fleet.scaling
    WANTED["answer"] = {"default": 5}
    watch.scale()
    assert WANTED["seen"] == {
        "default": {"engines": 1, "serving": 1, "running": 3, "waiting": 4, "min": 1, "max": 2}
    }  # fmt: skip
    run.wait_for(1, State.NEW)
    watch.scale()  # as many as the bound allows are there
    assert ranks(run) == [0, 1]
    WANTED["answer"] = None
    watch.scale()
    WANTED["answer"] = {"default": 0}
    watch.scale()
    assert ranks(run) == [0]  # that which had no requests left
    for wrong in ("3", {"default": 1.5}):
        WANTED["answer"] = wrong
        with pytest.raises(TypeError, match="expected None, or a dict"):
            watch.scale()
    WANTED["answer"] = {"judge": 1}
    with pytest.raises(EngineChangeError, match="no model 'judge'"):
        watch.scale()


def test_nothing_is_removed_while_no_engine_lives(world: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    run = world(
        2,
        custom_engine_scaling_path=f"{__name__}.wanted_engines",
        use_fault_tolerance=True,
        engine_scaling_interval=1e6,
    )
    Engine.gate.clear()
    for rank in (0, 1):
        run.member(rank).engine.ended_by = "it ended"
    run.fleet.reap_exited()
    WANTED["answer"] = {"default": 1}
    run.fleet.scaling.scale()
    assert "without engines" not in caplog.text
    Engine.gate.set()


def test_refusals_of_the_manager_reach_the_command_as_they_are(make_manager: Any) -> None:
    manager = make_manager()
    with pytest.raises(RemoteFailure, match=r"^the run has no engines"):
        manager.add_engines()
    assert manager.deployment() == {}


def test_slots_are_made_for_engines_that_may_be_added() -> None:
    flags = {"actor_num_gpus_per_node": 1, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2}
    assert spare_slots(run_args(**flags)) == 0
    assert spare_slots(run_args(**flags, rollout_max_engines=5)) == 6
    assert spare_slots(run_args(**flags, rollout_max_engines=5, offload_rollout=True)) == 0
