"""Engines that are lost and restarted: which get requests, which get weights, and what is reported."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from slime.ray.manager.engines import fleet as engine_fleet
from slime.ray.manager.engines import health as engine_health
from slime.ray.manager.engines import lifecycle as engine_lifecycle
from slime.ray.manager.engines import served_model
from slime.ray.manager.engines.members import State
from slime.servers import http_utils
from slime.servers.http import EngineError, RouterError
from slime.servers.types import EngineInfo
from slime.utils import run_key
from tests.support.fake_fleet import PATIENCE_S, Client, Engine, infos, push, wait_until


def test_engines_that_start_get_requests_and_end_with_the_fleet(world: Any) -> None:
    run = world()
    assert run.router.engines == ["http://e0:1", "http://e1:2"]
    assert [info.rank for info in infos(run)] == [0, 1]
    assert run.fleet.check_weights("checksum") == [f"weights_checker of {url}" for url in run.router.engines]
    assert run.fleet.counts() == {}
    run.fleet.stop()
    assert all(engine.is_ended.is_set() for engine in Engine.started)
    assert run.router.stopped


def test_servers_that_have_ended_get_no_key(world: Any, monkeypatch: Any) -> None:
    forgotten: list[str] = []
    monkeypatch.setattr(run_key, "forget", forgotten.append)
    run = world()
    Engine.started[1].ended_by = "killed"
    run.fleet.reap_exited()
    assert forgotten == ["http://e1:2"]
    run.fleet.stop()
    assert {"http://e0:1", run.router.url} <= set(forgotten)


def test_engines_whose_weights_a_push_would_not_renew_end_the_start(world: Any, monkeypatch: Any, caplog: Any) -> None:
    """One engine of each group is asked what it has decided; without a trainer there are no pushes."""
    asked: list[str] = []

    def server_info(client: Client) -> dict[str, Any]:
        asked.append(client.url)
        return {
            "moe_runner_backend": "flashinfer_trtllm",
            "kv_cache_dtype": "fp8_e4m3",
            "quantization_param_path": "/s",
        }

    monkeypatch.setattr(Client, "server_info", server_info)
    with pytest.raises(ValueError, match="engine 0: --sglang-moe-runner-backend flashinfer_trtllm "):
        world()
    assert asked == ["http://e0:1"]
    assert "engine 0: --sglang-quantization-param-path /s: the scales" in caplog.text
    world(debug_rollout_only=True)
    assert len(asked) == 1


def test_an_engine_that_does_not_say_what_it_is_made_of_is_not_checked(
    world: Any, monkeypatch: Any, caplog: Any
) -> None:
    def server_info(client: Client) -> dict[str, Any]:
        raise EngineError("GET", client.url, status=404, body="no such page")

    monkeypatch.setattr(Client, "server_info", server_info)
    assert len(infos(world())) == 2
    assert "engine 0 does not say what it is made of, which is not checked" in caplog.text


def test_without_the_flag_the_others_continue_and_the_loss_is_reported_with_the_log(world: Any, caplog: Any) -> None:
    run = world()
    Engine.started[1].ended_by = "engine 1 (pid 7) was ended by signal 9.\nLast lines of engine_1.log:\n  | boom"
    run.fleet.reap_exited()
    assert run.router.engines == ["http://e0:1"]
    assert [info.rank for info in infos(run)] == [0]
    assert not run.events.failed.is_set()
    (reported,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "ended by signal 9" in reported.message
    assert "| boom" in reported.message
    assert "1 of 2 engines continue" in reported.message
    assert "--use-fault-tolerance" in reported.message
    assert run.fleet.recover() == 0
    assert run.fleet.counts() == {
        "rollout/engines/serving": 1, "rollout/engines/lost": 1, "rollout/engines/restarted": 0
    }  # fmt: skip
    run.fleet.reap_exited()
    assert run.fleet.members.lost == 1  # reported once
    assert len(Engine.started) == 2
    assert Engine.started[1].is_ended.wait(PATIENCE_S)


def test_the_last_engine_ends_the_run_with_its_reason(world: Any) -> None:
    run = world()
    for engine in Engine.started:
        engine.ended_by = f"engine {engine.plan.rank} exited with code 3."
    run.fleet.reap_exited()
    assert run.events.failed.is_set()
    assert "engine 1 exited with code 3." in str(run.events.failure)
    assert "No engine is left. With --use-fault-tolerance engines are restarted." in str(run.events.failure)
    assert infos(run) == []


def test_a_lost_engine_is_restarted_with_weights_first_and_requests_then(world: Any) -> None:
    run = world(use_fault_tolerance=True)
    Engine.gate.clear()
    Engine.started[0].ended_by = "engine 0 exited with code 1."
    run.fleet.reap_exited()
    assert Engine.started[0].is_ended.wait(PATIENCE_S)
    assert [info.url for info in infos(run)] == run.router.engines == ["http://e1:2"]
    Engine.gate.set()
    assert run.fleet.recover() == 1  # waits for it
    assert [info.url for info in infos(run)] == ["http://e0:3", "http://e1:2"]
    assert run.router.engines == ["http://e1:2"]  # not before it has the weights
    push(run)
    assert run.router.engines == ["http://e1:2", "http://e0:3"]
    assert run.fleet.num_new == 0
    assert run.fleet.counts() == {
        "rollout/engines/serving": 2, "rollout/engines/lost": 1, "rollout/engines/restarted": 1
    }  # fmt: skip
    assert not run.events.need.is_set()


def test_health_checks_pause_while_weights_are_taken(world: Any) -> None:
    run = world(use_fault_tolerance=True)
    monitor = run.fleet.health
    assert not monitor.is_active
    run.fleet.resume_checks()
    assert monitor.is_active
    run.fleet.recover()
    assert not monitor.is_active
    run.fleet.resume_checks()
    assert not monitor.is_active
    push(run)
    assert monitor.is_active
    run.fleet.pause_checks()
    run.fleet.recover()
    push(run)
    assert not monitor.is_active  # offloaded before and after


def test_an_engine_that_fails_its_checks_is_lost_with_its_log(world: Any, caplog: Any) -> None:
    run = world(use_fault_tolerance=True)
    run.fleet.resume_checks()
    run.fleet.health.check()
    Client.silent.add("http://e1:2")
    run.fleet.health.check()
    run.fleet.health.check()
    assert "http://e1:2" in run.router.engines
    run.fleet.health.check()
    assert run.router.engines == ["http://e0:1"]
    assert Engine.started[1].is_ended.wait(PATIENCE_S)
    reported = next(r.message for r in caplog.records if r.levelno == logging.ERROR)
    assert reported.startswith("engine 1 (http://e1:2): 3 health checks in a row failed, the last: GET http://e1:2")
    assert "  | serving" in reported
    assert run.fleet.recover() == 1


def test_when_all_are_lost_weights_are_asked_for_as_soon_as_one_is_back(world: Any) -> None:
    run = world(use_fault_tolerance=True)
    Engine.gate.clear()
    for engine in Engine.started:
        engine.ended_by = "killed"
    run.fleet.reap_exited()
    assert not run.events.need.is_set()
    Engine.gate.set()
    assert run.events.need.wait(PATIENCE_S)
    assert not run.events.failed.is_set()
    assert run.fleet.recover() == 2
    push(run)
    assert len(run.router.engines) == 2


def test_an_engine_that_is_restarted_during_a_push_waits_for_the_next(world: Any) -> None:
    run = world(use_fault_tolerance=True)
    assert run.fleet.recover() == 0
    offered = run.fleet.offer()
    assert len(offered) == 2
    Engine.started[0].ended_by = "killed"
    run.fleet.reap_exited()
    run.wait_for(0, State.NEW)
    run.fleet.admit()
    assert run.router.engines == ["http://e1:2"]
    assert run.fleet.num_new == 1
    # Its weights are not those of the others: what compares them leaves it out.
    assert run.fleet.check_weights("checksum") == ["weights_checker of http://e1:2"]
    assert run.fleet.recover() == 1
    push(run)
    assert run.router.engines == ["http://e1:2", "http://e0:3"]


def test_the_loss_of_the_last_that_serves_is_reported_while_another_waits_for_weights(world: Any) -> None:
    run = world(use_fault_tolerance=True)
    Engine.started[0].ended_by = "killed"
    run.fleet.reap_exited()
    run.wait_for(0, State.NEW)
    assert not run.events.need.is_set()
    Engine.gate.clear()  # the other is not restarted for now
    Engine.started[1].ended_by = "killed"
    run.fleet.reap_exited()
    assert run.events.need.is_set()
    Engine.gate.set()


def test_an_engine_that_does_not_restart_is_tried_again_and_then_given_up(world: Any, caplog: Any) -> None:
    run = world(use_fault_tolerance=True)
    Engine.broken_starts += ["no memory", "no memory", "no memory left"]
    Engine.started[0].ended_by = "killed"
    run.fleet.reap_exited()
    assert run.fleet.recover() == 0
    assert len(Engine.started) == 2 + engine_lifecycle.ATTEMPTS
    assert all(engine.is_ended.is_set() for engine in Engine.started if engine.plan.rank == 0)
    assert "could not be restarted in 3 attempts" in caplog.text
    assert "no memory left" in caplog.text
    assert not run.events.failed.is_set()
    Engine.broken_starts += ["no memory"] * 3
    Engine.started[1].ended_by = "killed"
    run.fleet.reap_exited()
    assert run.events.failed.wait(PATIENCE_S)
    assert "no engine is left: engine 1 could not be restarted" in str(run.events.failure)


def test_an_engine_whose_node_is_gone_is_not_given_up_and_not_waited_for(world: Any, caplog: Any) -> None:
    run = world(use_fault_tolerance=True)
    Engine.without_slots.add(0)
    Engine.started[0].ended_by = "its actor ended, and the engine with it"
    run.fleet.reap_exited()
    wait_until(lambda: len(Engine.started) > 2 + 2 * engine_lifecycle.ATTEMPTS)
    assert run.fleet.recover() == 0
    assert push(run) == ["http://e1:2"]
    assert caplog.text.count("a node of its slots is gone. It is started as soon as a node has.") == 1
    assert "could not be restarted" not in caplog.text
    Engine.without_slots.clear()
    wait_until(lambda: run.fleet.num_new == 1)
    assert run.fleet.recover() == 1
    push(run)
    assert len(run.router.engines) == 2


def test_a_run_ends_when_no_node_has_room_for_the_last_engine(world: Any) -> None:
    run = world(slots=1, use_fault_tolerance=True, engine_ready_timeout=0.2)
    Engine.without_slots.add(0)
    Engine.started[0].ended_by = "its actor ended, and the engine with it"
    run.fleet.reap_exited()
    assert run.events.failed.wait(PATIENCE_S)
    assert "a node of its slots is gone, for 0.2 s now" in str(run.events.failure)


def test_the_last_to_be_given_up_ends_the_run(world: Any) -> None:
    run = world(use_fault_tolerance=True)
    Engine.broken_starts += ["no memory"] * 6
    for engine in Engine.started:
        engine.ended_by = "killed"
    run.fleet.reap_exited()
    assert run.events.failed.wait(PATIENCE_S)
    assert "no engine is left" in str(run.events.failure)
    assert not run.events.need.is_set()


def test_an_engine_that_starts_at_the_second_attempt_is_back(world: Any) -> None:
    run = world(use_fault_tolerance=True)
    Engine.broken_starts.append("port taken")
    Engine.started[0].ended_by = "killed"
    run.fleet.reap_exited()
    assert run.fleet.recover() == 1
    assert [info.url for info in infos(run)] == ["http://e0:4", "http://e1:2"]


def test_engines_that_share_devices_are_restarted_when_they_are_theirs(world: Any) -> None:
    run = world(use_fault_tolerance=True, offload_rollout=True)
    Engine.started[0].ended_by = "killed"
    run.fleet.reap_exited()
    assert Engine.started[0].is_ended.wait(PATIENCE_S)
    assert len(Engine.started) == 2
    assert run.fleet.recover() == 1
    # As much memory as the others have at that moment: that of the weights.
    assert Client.calls[-2:] == [("http://e0:3", "release_memory"), ("http://e0:3", "resume_memory ['weights']")]
    Engine.started[1].ended_by = "killed"
    Engine.started[2].ended_by = "killed"
    run.fleet.reap_exited()
    assert run.events.need.is_set()  # nothing is restarted without a push


@pytest.mark.parametrize("offload", [False, True])
def test_without_a_trainer_engines_serve_when_they_are_back(world: Any, offload: bool) -> None:
    run = world(use_fault_tolerance=True, debug_rollout_only=True, offload_rollout=offload)
    Engine.started[0].ended_by = "killed"
    run.fleet.reap_exited()
    run.wait_for(0, State.SERVING)
    assert run.router.engines == ["http://e1:2", "http://e0:3"]


def test_a_call_to_all_continues_without_the_one_that_is_silent(world: Any) -> None:
    run = world()
    Client.silent.add("http://e0:1")
    assert run.fleet.check_weights("checksum") == ["weights_checker of http://e1:2"]
    assert [info.rank for info in infos(run)] == [1]
    asked = [what for url, what in Client.calls if url == "http://e0:1" and what.startswith("loads")]
    assert len(asked) == engine_health.ANSWER_ATTEMPTS


def test_a_call_that_an_engine_refuses_is_a_failure(world: Any, monkeypatch: Any) -> None:
    run = world()

    def refuse(engine: Client, action: str) -> None:
        if engine.url == "http://e1:2":
            raise EngineError("POST", engine.url, status=400, body="tensors differ")

    monkeypatch.setattr(Client, "weights_checker", refuse, raising=False)
    with pytest.raises(EngineError, match="tensors differ"):
        run.fleet.check_weights("compare")
    assert len(infos(run)) == 2


def test_an_engine_that_answers_with_an_error_is_not_silent(monkeypatch: Any) -> None:
    class Grumpy(Client):
        def loads(self, timeout: float) -> None:
            raise EngineError("GET", "/v1/loads", status=500, body="not now")

    monkeypatch.setattr(engine_health, "EngineClient", Grumpy)
    assert engine_health.check_alive(EngineInfo("http://e0:1")) is None


def test_before_a_push_silent_engines_are_lost_only_with_the_flag(world: Any) -> None:
    run = world()
    Client.silent.add("http://e0:1")
    run.fleet.recover()
    assert len(infos(run)) == 2
    run = world(use_fault_tolerance=True)
    Client.silent.add(infos(run)[0].url)
    run.fleet.recover()
    assert run.fleet.members.lost == 1


def test_a_new_engine_that_the_router_refuses_is_replaced_again(world: Any) -> None:
    run = world(use_fault_tolerance=True)
    run.router.refuses.add("http://e0:3")
    Engine.started[0].ended_by = "killed"
    run.fleet.reap_exited()
    assert run.fleet.recover() == 1
    push(run)
    assert run.fleet.members.lost == 2
    assert run.fleet.recover() == 1
    push(run)
    assert run.router.engines == ["http://e1:2", "http://e0:4"]


def test_a_router_that_ends_is_started_again_with_the_engines_that_serve(world: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine_fleet, "WATCH_INTERVAL_S", 0.01)
    run = world(use_fault_tolerance=True)
    Engine.gate.clear()
    Engine.started[0].ended_by = "killed"
    wait_until(lambda: run.fleet.members.lost)
    run.router.ended_by = "router (pid 3) was ended by signal 9."
    wait_until(lambda: run.router.engines == ["http://e1:2"] and run.fleet.models[0].router_restarts)
    Engine.gate.set()
    assert run.fleet.recover() == 1
    push(run)
    assert run.router.engines == ["http://e1:2", "http://e0:3"]
    assert run.router.restarts == 1
    assert not run.events.failed.is_set()
    assert run.fleet.counts()["rollout/engines/router_restarts"] == 1


def test_an_engine_that_joins_a_router_that_has_just_ended_is_not_lost(world: Any) -> None:
    """The router's end has not been noticed yet."""
    run = world(use_fault_tolerance=True)
    Engine.started[0].ended_by = "killed"
    run.fleet.reap_exited()
    assert run.fleet.recover() == 1
    run.router.ended_by = "killed"
    push(run)
    assert run.router.engines == ["http://e1:2", "http://e0:3"]
    assert run.fleet.members.lost == 1


@pytest.mark.parametrize("how", ["refused", "ended"])
def test_a_router_that_is_started_again_continues_without_an_engine_that_does_not_join(
    world: Any, caplog: Any, how: str
) -> None:
    """Here the first of two; the host may have ended it together with the router."""
    run = world(use_fault_tolerance=True)
    if how == "ended":
        Engine.started[0].ended_by = "engine 0 (pid 7) was ended by signal 9"
    run.router.refuses.add("http://e0:1")  # it does not answer the router
    run.router.ended_by = "router (pid 3) was ended by signal 9."
    run.fleet.lifecycle.revive_router(run.fleet.models[0])
    assert run.router.engines == ["http://e1:2"]
    assert run.fleet.members.lost == 1
    assert ("ended by signal 9" if how == "ended" else "it cannot join the router again") in caplog.text
    assert run.fleet.recover() == 1
    push(run)
    assert run.router.engines == ["http://e1:2", "http://e0:3"]
    assert not run.events.failed.is_set()


def test_a_router_and_its_only_engine_end_together(world: Any) -> None:
    run = world(1, use_fault_tolerance=True)
    Engine.started[0].ended_by = "killed"
    run.router.refuses.add("http://e0:1")
    run.router.ended_by = "killed"
    run.fleet.lifecycle.revive_router(run.fleet.models[0])
    assert run.fleet.recover() == 1
    push(run)
    assert run.router.engines == ["http://e0:2"]
    assert not run.events.failed.is_set()


@pytest.mark.parametrize("moment_s", [0.0, 0.1])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_router_that_ends_again_while_engines_join_costs_no_engine(world: Any, is_new: bool, moment_s: float) -> None:
    """Its connections break ``moment_s`` before its process has ended."""
    run = world(use_fault_tolerance=True)
    added, killed = run.router.add_engine, []

    def add_engine(info: EngineInfo) -> None:
        if run.router.restarts == 1 and info.rank == 1 and not killed:
            killed.append(threading.Timer(moment_s, setattr, (run.router, "ended_by", "killed again")))
            killed[0].start()
            if not moment_s:
                killed[0].join()
            raise RouterError("POST", "/workers", status=None, body="connection reset")
        added(info)

    run.router.add_engine = add_engine
    run.router.ended_by = "killed"
    lifecycle, second = run.fleet.lifecycle, run.member(1)
    if is_new:
        run.fleet.members.change(second, (State.SERVING,), State.NEW)
        lifecycle.register(second)
    else:
        for _ in range(2):
            lifecycle.revive_router(run.fleet.models[0])
    assert run.router.restarts == 2
    assert run.router.engines == ["http://e0:1", "http://e1:2"]
    assert run.fleet.members.lost == 0


def test_a_router_that_takes_no_engine_again_ends_the_run(world: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine_fleet, "WATCH_INTERVAL_S", 0.01)
    run = world(use_fault_tolerance=True)
    run.router.refuses |= {"http://e0:1", "http://e1:2"}
    run.router.ended_by = "router (pid 3) was ended by signal 9."
    assert run.events.failed.wait(PATIENCE_S)
    assert "It was started again, and takes no engine" in str(run.events.failure)


@pytest.mark.parametrize("ended_by", ["a port that is taken", "killed too often"])
def test_a_router_that_does_not_start_again_ends_the_run(world: Any, monkeypatch: Any, ended_by: str) -> None:
    monkeypatch.setattr(engine_fleet, "WATCH_INTERVAL_S", 0.01)
    run = world(use_fault_tolerance=True)
    if ended_by == "killed too often":
        run.fleet.models[0].router_restarts = served_model.ROUTER_RESTARTS
    run.router.ended_by = ended_by
    assert run.events.failed.wait(PATIENCE_S)
    assert ended_by in str(run.events.failure)


def test_an_engine_whose_answers_are_rejected_again_and_again_is_replaced(world: Any, caplog: Any) -> None:
    run = world(use_fault_tolerance=True)
    for _ in range(engine_health.REJECTIONS_LIMIT - 1):
        run.fleet.note_rejected(run.router.url, "http://e0:1", "token 0 of 4 has the log-prob None")
    run.fleet.note_rejected(run.router.url, "http://e1:2", "token 0 of 4 has the log-prob None")
    run.fleet.note_rejected("http://other", "http://e0:1", "another model's")
    assert run.fleet.members.lost == 0
    run.fleet.note_rejected(run.router.url, "http://e0:1", "token 3 of 4 has the log-prob None")
    wait_until(lambda: Engine.started[0].is_ended.is_set())
    reported = next(r.message for r in caplog.records if r.levelno == logging.ERROR)
    assert reported.startswith("engine 0 (http://e0:1): 3 of its answers could not be used, the last: token 3 of 4")
    assert run.router.engines == ["http://e1:2"]
    assert run.fleet.recover() == 1
    push(run)
    assert run.fleet.counts() == {
        "rollout/engines/serving": 2, "rollout/engines/lost": 1, "rollout/engines/restarted": 1,
        "rollout/engines/rejected_answers": 4,
    }  # fmt: skip


def test_engines_are_asked_when_the_router_does_not_say_who_answered(world: Any, caplog: Any) -> None:
    run = world(use_fault_tolerance=True)
    http_utils.get_http_client().answers.oldest_version[run.router.url] = 3
    meta = {"output_token_logprobs": [[-0.1, 5, None]], "completion_tokens": 1, "finish_reason": {"type": "length"}}
    for url, version in (("http://e0:1", "3"), ("http://e1:2", "2")):
        Client.answers[url] = {"meta_info": {**meta, "weight_version": version}}
    run.fleet.note_rejected(run.router.url, None, "weight version 2")
    wait_until(lambda: Engine.started[1].is_ended.is_set())
    assert run.router.engines == ["http://e0:1"]
    assert "its answer to a check cannot either: it was generated with weight version 2, and version 3" in caplog.text


def test_an_engine_that_hangs_in_one_call_is_replaced(world: Any, caplog: Any) -> None:
    """It answers every other call."""
    run = world(use_fault_tolerance=True)
    Client.hanging.add(("http://e1:2", "weights_checker"))
    assert run.fleet.check_weights("checksum") == ["weights_checker of http://e0:1"]
    assert run.router.engines == ["http://e0:1"]
    assert "engine 1 (http://e1:2): it hangs. POST http://e1:2/weights_checker" in caplog.text
    assert run.fleet.recover() == 1
    push(run)
    run.fleet.mark_unreachable_dead({"http://e0:1": "could not flush the prefix cache"})
    assert "engine 0 (http://e0:1): it hangs in a weight sync: could not flush the prefix cache" in caplog.text
    assert run.fleet.recover() == 1


def test_nothing_is_started_again_once_the_fleet_stops(world: Any) -> None:
    run = world(use_fault_tolerance=True)
    Engine.gate.clear()
    Engine.broken_starts += ["ended while it was being started"]
    Engine.started[0].ended_by = "killed"
    run.fleet.reap_exited()
    run.wait_for(0, State.STARTING)
    stopping = threading.Thread(target=run.fleet.stop)
    stopping.start()
    for engine in Engine.started:
        assert engine.is_ended.wait(PATIENCE_S)
    Engine.gate.set()
    stopping.join(PATIENCE_S)
    assert len(Engine.started) == 3
    run.fleet.lifecycle.mark_dead(run.member(1), "too late")
    assert run.fleet.members.lost == 1


def test_a_first_start_that_fails_is_raised(world: Any, monkeypatch: Any) -> None:
    def fail(self: Engine) -> EngineInfo:
        raise RuntimeError("EngineStartError: no such checkpoint")

    monkeypatch.setattr(Engine, "start", fail)
    with pytest.raises(RuntimeError, match="no such checkpoint"):
        world()
