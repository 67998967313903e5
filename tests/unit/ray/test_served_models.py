"""Several models: who is behind which router, who gets weights, who is restarted when, who releases memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from slime.backends.sglang_utils.router import RouterProcess, RunningRouter
from slime.ray.manager.engines import fleet as engine_fleet
from slime.ray.manager.engines import lifecycle as engine_lifecycle
from slime.ray.manager.engines import members as engine_members
from slime.ray.manager.engines.members import Members, State
from slime.ray.manager.engines.served_model import ROUTER_RESTARTS, ServedModel, new_router
from tests.support.fake_fleet import PATIENCE_S, Client, Engine, World, push
from tests.support.standin_fleet import fleet_args

ACTOR_AND_JUDGE = """
sglang:
  - name: actor
    server_groups: [{num_gpus: 1}]
  - name: judge
    model_path: /models/judge
    server_groups: [{num_gpus: 1}]
"""
TWO_JUDGES = """
sglang:
  - name: actor
    server_groups: [{num_gpus: 1}, {worker_type: placeholder, num_gpus: 1}]
  - name: judge
    model_path: /models/judge
    server_groups: [{num_gpus: 2}]
"""
ACTOR, JUDGE = "http://e0:1", "http://e1:2"
# Two slots of the trainer, on which actor and judge take turns with it, and one beyond them.
SHARED = {"colocate": True, "offload_rollout": True, "actor_num_gpus_per_node": 2}


@pytest.fixture
def served(world: Any, tmp_path: Path) -> Any:
    """Makes a fleet that serves the models of a file."""

    def make(text: str = ACTOR_AND_JUDGE, slots: int = 2, **changes: Any) -> World:
        path = tmp_path / "engines.yaml"
        path.write_text(text)
        made: World = world(slots, sglang_config=str(path), rollout_num_gpus=slots, **changes)
        return made

    return make


def kill(run: World, *ranks: int) -> None:
    for rank in ranks:
        run.member(rank).engine.ended_by = f"engine {rank} exited with code 3."  # type: ignore[attr-defined]
    run.fleet.reap_exited()


def calls_of(url: str) -> list[str]:
    return [what for asked, what in Client.calls if asked == url]


def test_every_model_has_a_router_of_its_own(served: Any) -> None:
    run = served()
    assert {name: router.engines for name, router in run.routers.items()} == {"actor": [ACTOR], "judge": [JUDGE]}
    args = run.fleet.args
    assert args.sglang_model_routers == {"actor": ("127.0.0.1", 1), "judge": ("127.0.0.1", 2)}
    assert (args.sglang_router_ip, args.sglang_router_port) == ("127.0.0.1", 1)
    assert args.sglang_model_engines == {"actor": 1, "judge": 1}
    run.fleet.stop()
    assert all(router.stopped for router in run.routers.values())


def test_flags_of_the_router_are_about_the_first_models(tmp_path: Path) -> None:
    args = fleet_args(2, sglang_router_port=3000, run_dir=str(tmp_path))
    actor, judge = (ServedModel(name, [], Members(), update_weights=False) for name in ("actor", "org/judge"))
    first, second = (new_router(args, model, "127.0.0.1", is_first=model is actor) for model in (actor, judge))
    assert isinstance(first, RouterProcess)
    assert isinstance(second, RouterProcess)
    assert (first.port, first.name, first.log_path.name) == (3000, "router", "router.log")
    assert (second.port, second.name) == (None, "router of model org/judge")
    assert second.log_path == tmp_path / "logs" / "router_org_judge.log"
    args.sglang_router_ip = "10.0.0.1"
    running, own = (new_router(args, model, "127.0.0.1", is_first=model is actor) for model in (actor, judge))
    assert isinstance(running, RunningRouter)
    assert isinstance(own, RouterProcess)


def test_one_model_is_called_default(world: Any) -> None:
    args = world().fleet.args
    assert args.sglang_model_routers == {"default": ("127.0.0.1", 1)}
    assert args.sglang_model_engines == {"default": 2}


def test_slots_of_a_placeholder_stay_free(served: Any) -> None:
    run = served(TWO_JUDGES, slots=4)
    assert [(plan.model, plan.gpu_offset) for plan in run.fleet.plans] == [("actor", 0), ("judge", 2), ("judge", 3)]
    assert run.routers["judge"].engines == ["http://e1:2", "http://e2:3"]


def test_weights_are_those_of_the_actor_alone(served: Any) -> None:
    run = served()
    assert [info.url for info in run.fleet.offer()] == [ACTOR]
    assert run.fleet.check_weights("snapshot") == [f"weights_checker of {ACTOR}"]
    assert calls_of(JUDGE) == []


def test_an_engine_of_the_judge_is_back_without_weights(served: Any, caplog: Any) -> None:
    run = served(use_fault_tolerance=True)
    Engine.gate.clear()
    kill(run, 1)
    assert run.routers["judge"].engines == []
    assert "It was the last one of model judge that served. It is restarted, and serves as soon as it" in caplog.text
    assert run.fleet.recover() == 0  # a push does not wait for it
    assert push(run) == [ACTOR]
    Engine.gate.set()
    run.wait_for(1, State.SERVING)
    assert run.routers["judge"].engines == ["http://e1:3"]
    assert not run.events.failed.is_set()
    assert not run.events.need.is_set()
    assert push(run) == [ACTOR]


DISAGGREGATED = """
sglang:
  - name: actor
    server_groups: [{worker_type: prefill, num_gpus: 1}, {worker_type: decode, num_gpus: 2}]
"""


def test_requests_are_counted_where_they_are_decoded(served: Any) -> None:
    run = served(DISAGGREGATED, slots=3)
    assert run.routers["actor"].engines == ["http://e0:1", "http://e1:2", "http://e2:3"]
    assert run.fleet.args.sglang_model_engines == {"actor": 2}
    assert len(push(run)) == 3  # and all get the trainer's weights


def test_requests_are_counted_there_after_changes_too(served: Any) -> None:
    run = served(DISAGGREGATED, slots=3)
    run.fleet.lifecycle.remove([1], 0.0)
    assert run.fleet.args.sglang_model_engines == {"actor": 1}
    run.fleet.lifecycle.add(worker_type="decode")
    assert run.fleet.args.sglang_model_engines == {"actor": 2}


@pytest.mark.parametrize(("lost", "kind"), [((0,), "prefill"), ((1, 2), "decode")])
def test_the_last_engine_of_a_kind_is_the_last(served: Any, caplog: Any, lost: tuple[int, ...], kind: str) -> None:
    run = served(DISAGGREGATED, slots=3)
    kill(run, *lost)
    assert run.events.failed.is_set()
    assert f"No {kind} engine of model actor is left. With --use-fault-tolerance" in caplog.text


def test_one_of_two_decode_engines_is_not_missed(served: Any) -> None:
    run = served(DISAGGREGATED, slots=3)
    kill(run, 1)
    assert not run.events.failed.is_set()
    assert run.router.engines == ["http://e0:1", "http://e2:3"]


def test_a_prefill_engine_is_back_after_a_push(served: Any, caplog: Any) -> None:
    """Without one nothing can be answered: weights are needed at once, though engines that decode serve."""
    run = served(DISAGGREGATED, slots=3, use_fault_tolerance=True)
    kill(run, 0)
    assert "It was the last prefill engine of model actor that served. It is restarted, and serves" in caplog.text
    run.wait_for(0, State.NEW)
    assert run.events.need.wait(PATIENCE_S)
    assert "http://e0:4" in push(run)
    assert run.router.engines == ["http://e1:2", "http://e2:3", "http://e0:4"]


def test_a_prefill_engine_that_cannot_be_started_ends_the_run(served: Any) -> None:
    run = served(DISAGGREGATED, slots=3, use_fault_tolerance=True)
    Engine.broken_starts = ["broken"] * engine_lifecycle.ATTEMPTS
    kill(run, 0)
    assert run.events.failed.wait(PATIENCE_S)


def test_metrics_are_of_all_and_of_each_model(served: Any, world: Any) -> None:
    run = served(use_fault_tolerance=True)
    kill(run, 1)
    run.wait_for(1, State.SERVING)
    each = {
        "rollout/engines/actor/serving": 1, "rollout/engines/actor/lost": 0, "rollout/engines/actor/restarted": 0,
        "rollout/engines/judge/serving": 1, "rollout/engines/judge/lost": 1, "rollout/engines/judge/restarted": 1,
    }  # fmt: skip
    totals = {"rollout/engines/serving": 2, "rollout/engines/lost": 1, "rollout/engines/restarted": 1}
    assert run.fleet.counts() == totals | each
    run.fleet.members.rejected_of["judge"] = 2
    run.fleet.models[1].router_restarts = 1
    rare = {"rejected_answers": 2, "router_restarts": 1}
    rare |= {f"judge/{name}": count for name, count in rare.items()}
    counts = totals | each | {f"rollout/engines/{name}": count for name, count in rare.items()}
    assert run.fleet.counts() == counts


def test_the_only_actor_is_restarted_with_weights_while_the_judge_continues(served: Any) -> None:
    run = served(use_fault_tolerance=True)
    kill(run, 0)
    assert run.events.need.wait(PATIENCE_S)
    assert run.fleet.recover() == 1
    assert run.routers["actor"].engines == []
    assert push(run) == ["http://e0:3"]
    assert run.routers["actor"].engines == ["http://e0:3"]
    assert run.routers["judge"].engines == [JUDGE]
    assert not run.events.failed.is_set()


@pytest.mark.parametrize(("rank", "model"), [(0, "actor"), (1, "judge")])
def test_without_the_flag_a_model_without_engines_ends_the_run(served: Any, rank: int, model: str) -> None:
    run = served()
    kill(run, rank)
    assert run.events.failed.is_set()
    expected = f"No engine of model {model} is left. With --use-fault-tolerance engines are restarted."
    assert expected in str(run.events.failure)
    assert f"engine {rank} exited with code 3." in str(run.events.failure)


def test_without_the_flag_the_other_judge_continues(served: Any, caplog: Any) -> None:
    run = served(TWO_JUDGES, slots=4)
    kill(run, 2)
    assert not run.events.failed.is_set()
    assert run.routers["judge"].engines == ["http://e1:2"]
    assert "1 of 2 engines of model judge continue; requests of the lost one are sent to them." in caplog.text


def test_a_judge_that_cannot_be_restarted_ends_the_run_when_it_is_the_last(served: Any) -> None:
    run = served(TWO_JUDGES, slots=4, use_fault_tolerance=True)
    Engine.broken_starts += ["no memory"] * engine_lifecycle.ATTEMPTS
    kill(run, 1)
    run.fleet.lifecycle._join(PATIENCE_S, lambda plan: True)
    assert not run.events.failed.is_set()
    Engine.broken_starts += ["no memory"] * engine_lifecycle.ATTEMPTS
    kill(run, 2)
    assert run.events.failed.wait(PATIENCE_S)
    expected = "no engine of model judge is left: engine 2 of model judge could not be restarted in 3 attempts"
    assert expected in str(run.events.failure)
    assert run.routers["actor"].engines == [ACTOR]


def test_the_end_of_the_second_router_for_good_ends_the_run(served: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine_fleet, "WATCH_INTERVAL_S", 0.01)
    run = served()
    run.fleet.models[1].router_restarts = ROUTER_RESTARTS
    run.routers["judge"].ended_by = "router of model judge (pid 3) was ended by signal 9."
    assert run.events.failed.wait(PATIENCE_S)
    assert "router of model judge (pid 3)" in str(run.events.failure)


def test_a_judge_takes_its_memory_back_when_the_trainer_has_left(served: Any) -> None:
    run = served(**SHARED)
    run.fleet.release_memory()
    # The judge may be asked at any time: what is in flight ends, what comes waits.
    assert calls_of(JUDGE) == ["pause abort", "release_memory"]
    assert calls_of(ACTOR) == ["release_memory"]
    run.fleet.resume_memory(["weights"])
    assert calls_of(ACTOR)[1:] == ["resume_memory ['weights']"]
    assert len(calls_of(JUDGE)) == 2
    run.fleet.resume_memory(["kv_cache", "cuda_graph"])
    assert calls_of(ACTOR)[2:] == ["resume_memory ['kv_cache', 'cuda_graph']"]
    assert calls_of(JUDGE)[2:] == ["resume_memory None", "resume"]


@pytest.mark.parametrize("steps", [[None], [["weights"], ["cuda_graph"], ["kv_cache"]]])
def test_memory_is_taken_back_once(served: Any, steps: list[list[str] | None]) -> None:
    """SGLang's scheduler does not survive a second time."""
    run = served(**SHARED)
    run.fleet.resume_memory()
    assert Client.calls == []
    run.fleet.release_memory()
    run.fleet.release_memory()
    assert calls_of(JUDGE) == ["pause abort", "release_memory"]
    for tags in [*steps, *steps, None]:
        run.fleet.resume_memory(tags)
    taken = [str(tags) for tags in steps]
    assert calls_of(ACTOR) == ["release_memory", *(f"resume_memory {tags}" for tags in taken)]
    assert calls_of(JUDGE)[-1] == "resume"
    assert calls_of(JUDGE).count("resume") == 1
    back = [what for what in calls_of(JUDGE) if what.startswith("resume_memory")]
    assert back == (["resume_memory None"] if len(steps) == 1 else
                    ["resume_memory ['weights', 'cuda_graph']", "resume_memory ['kv_cache']"])  # fmt: skip


def test_groups_beyond_the_trainers_slots_keep_their_memory(served: Any) -> None:
    run = served(colocate=True, offload_rollout=True)  # one slot trains
    run.fleet.release_memory()
    run.fleet.resume_memory()
    assert calls_of(ACTOR) == ["release_memory", "resume_memory None"]
    assert calls_of(JUDGE) == []


def test_a_judge_on_shared_slots_is_restarted_while_they_are_the_engines(served: Any) -> None:
    run = served(use_fault_tolerance=True, **SHARED)
    kill(run, 1)
    run.wait_for(1, State.SERVING)
    assert run.routers["judge"].engines == ["http://e1:3"]
    assert calls_of("http://e1:3") == []  # it has all of its memory, as the others


def test_a_judge_lost_while_the_trainer_has_the_slots_waits_for_them(served: Any) -> None:
    run = served(use_fault_tolerance=True, **SHARED)
    run.fleet.release_memory()
    kill(run, 1)
    run.fleet.resume_memory(["weights"])
    assert run.fleet.recover() == 0
    assert push(run) == [ACTOR]
    assert len(Engine.started) == 2
    run.fleet.resume_memory(["kv_cache", "cuda_graph"])
    run.wait_for(1, State.SERVING)
    assert run.routers["judge"].engines == ["http://e1:3"]
    assert calls_of("http://e1:3") == []


def test_the_trainer_waits_for_a_judge_that_is_being_started(served: Any) -> None:
    """Else both would be on the device."""
    run = served(use_fault_tolerance=True, **SHARED)
    Engine.gate.clear()
    kill(run, 1)
    run.wait_for(1, State.STARTING)
    released = threading.Thread(target=run.fleet.release_memory)
    released.start()
    released.join(0.1)
    assert released.is_alive()
    Engine.gate.set()
    released.join(PATIENCE_S)
    assert calls_of("http://e1:3") == ["pause abort", "release_memory"]


def test_a_judge_that_does_not_start_in_its_turn_tries_again_in_the_next(served: Any) -> None:
    run = served(use_fault_tolerance=True, **SHARED)
    Engine.gate.clear()
    Engine.broken_starts.append("no memory")
    kill(run, 1)
    run.wait_for(1, State.STARTING)
    run.fleet.lifecycle.released = {"weights"}  # the trainer's turn begins
    Engine.gate.set()
    run.fleet.lifecycle.wait_for_devices()
    assert len(Engine.started) == 3
    run.fleet.resume_memory()
    run.wait_for(1, State.SERVING)
    assert run.routers["judge"].engines == ["http://e1:4"]
    assert not run.events.failed.is_set()


def test_a_lost_actor_on_shared_slots_is_restarted_beside_the_judge(served: Any) -> None:
    run = served(use_fault_tolerance=True, **SHARED)
    kill(run, 0)
    assert run.events.need.is_set()
    assert run.fleet.recover() == 1
    assert calls_of("http://e0:3") == ["release_memory", "resume_memory ['weights']"]
    # The trainer takes a turn in the middle of the rollout, and needs room to send from.
    assert calls_of(JUDGE)[-2:] == ["pause abort", "release_memory"]
    push(run)
    run.fleet.resume_memory(["kv_cache", "cuda_graph"])
    assert calls_of("http://e0:3")[2:] == ["resume_memory ['kv_cache', 'cuda_graph']"]
    assert calls_of(JUDGE)[-2:] == ["resume_memory None", "resume"]
    kill(run, 1)  # it is the engines' turn again
    run.wait_for(1, State.SERVING)


def test_a_frozen_model_ends_what_it_works_on_before_it_is_offloaded(served: Any, monkeypatch: Any) -> None:
    run = served(**SHARED)
    left = [2, 1, 0]
    monkeypatch.setattr(Client, "num_requests", lambda self: left.pop(0))
    monkeypatch.setattr(engine_members, "DRAIN_POLL_S", 0.0)
    run.fleet.release_memory()
    assert left == []
    assert calls_of(JUDGE) == ["pause abort", "release_memory"]
    run.fleet.resume_memory()
    monkeypatch.setattr(Client, "num_requests", lambda self: 1)
    monkeypatch.setattr(engine_members, "DRAIN_S", 0.01)
    run.fleet.release_memory()  # a request that does not end is aborted
    assert calls_of(JUDGE)[-2:] == ["pause abort", "release_memory"]
