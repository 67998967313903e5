"""An engine's actors as its fleet sees them: alive, ended, silent, gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from slime.arguments.placement import EnginePlan
from slime.ray import remote
from slime.ray.actors import engine_actor
from slime.ray.manager.engines import engine as ray_engine
from slime.ray.manager.engines import slots as engine_slots
from slime.ray.manager.engines.engine import POLL_DEADLINE_S, SLOTS_INTERVAL_S, STOP_DEADLINE_S, RayEngine
from slime.ray.manager.engines.members import SlotsLostError
from slime.ray.remote import RemoteFailure
from slime.servers.types import EngineInfo
from tests.support.arguments import run_args
from tests.support.fake_ray import NEVER, FakeRay, Ref


class Actor:
    """An actor handle: each method answers with its reference."""

    def __init__(self, **answers: Ref) -> None:
        self.answers, self.calls = answers, []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Ref:
            self.calls.append((name, args, kwargs))
            return self.answers.get(name) or Ref()

        return SimpleNamespace(remote=call)


class Cluster(FakeRay):
    def __init__(self) -> None:
        super().__init__()
        self.killed: list[Actor] = []
        self.alive = ["n0", "n1"]
        self.node_of = {bundle: "n1" if bundle > 5 else "n0" for bundle in range(8)}

    def nodes(self) -> list[dict[str, Any]]:
        """Ray lists nodes that are gone, too."""
        addresses = {"n0": "10.0.0.1", "n1": "10.0.0.2"}
        return [
            {"NodeID": node, "NodeManagerAddress": address, "Alive": node in self.alive}
            for node, address in addresses.items()
        ]

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)

    def get(self, ref: Ref, timeout: float | None = None) -> Any:
        if timeout is not None and ref.at > self.now + timeout:
            self.now += timeout
            raise ray.exceptions.GetTimeoutError("no answer")
        self.now = max(self.now, ref.at if timeout is not None else self.now)
        return super().get(ref)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    fake = Cluster()
    for module in (ray_engine, engine_slots, remote):
        monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr(remote, "time", fake)
    monkeypatch.setattr(engine_slots, "placement_group_table", lambda pg: {"bundles_to_node_id": fake.node_of})
    return fake


def engine_of(*actors: Actor, **of_group: Any) -> RayEngine:
    args = run_args(engine_ready_timeout=100.0)
    args.device_type = "cuda"
    plan = EnginePlan(3, 4, 2 * len(actors), 2, len(actors), **of_group)
    engine = RayEngine(args, plan, ("pg", list(range(8)), [7, 6, 5, 4, 3, 2, 1, 0]), {}, loopback=False)
    waiting_actors = list(actors)
    engine._launch = lambda node_rank: waiting_actors.pop(0)  # type: ignore[method-assign]
    return engine


INFO = EngineInfo("http://e3", rank=3)


def test_nothing_is_started_while_the_slots_have_no_node(cluster: Cluster) -> None:
    actor = Actor()
    cluster.node_of[4] = ""  # Ray looks for another one
    with pytest.raises(SlotsLostError, match=r"engine 3.*: a node of its slots is gone"):
        engine_of(actor).start()
    cluster.node_of[4] = "n0"
    cluster.alive.remove("n0")  # it does not look yet
    with pytest.raises(SlotsLostError, match=r"engine 3.*: a node of its slots is gone"):
        engine_of(actor).start()
    assert not actor.calls


def test_a_start_on_a_node_that_is_lost_meanwhile_ends(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds for each of its waits; on other nodes engines continue to start."""
    monkeypatch.setattr(ray_engine, "time", cluster)
    for answers in ({"start": Ref(at=NEVER)}, {"wait_ready": Ref(at=NEVER)}):
        cluster.now, cluster.alive = 0.0, ["n0", "n1"]
        lost = Actor(**answers)
        monkeypatch.setattr(cluster, "nodes", lambda: Cluster.nodes(_lose(cluster, "n0", at=30.0)))
        with pytest.raises(SlotsLostError, match="engine 3: a node of its slots is gone"):
            engine_of(lost).start()
        assert 30 <= cluster.now <= 30 + 2 * SLOTS_INTERVAL_S
        assert cluster.killed.pop() is lost
    cluster.now, cluster.alive = 0.0, ["n0", "n1"]
    monkeypatch.setattr(cluster, "nodes", lambda: Cluster.nodes(_lose(cluster, "n1", at=30.0)))
    assert engine_of(Actor(wait_ready=Ref(INFO, at=60))).start() == INFO


def _lose(cluster: Cluster, node: str, at: float) -> Cluster:
    if cluster.now >= at and node in cluster.alive:
        cluster.alive.remove(node)
    return cluster


def test_it_is_started_on_every_node_and_reached_at_the_first(cluster: Cluster) -> None:
    first = Actor(rendezvous=Ref("10.0.0.1:15000"), wait_ready=Ref(INFO, at=30))
    second = Actor(wait_ready=Ref(EngineInfo("http://other"), at=20))
    assert engine_of(first, second).start() == INFO
    started = [next(kwargs for name, _, kwargs in actor.calls if name == "start") for actor in (first, second)]
    assert [kwargs["dist_init_addr"] for kwargs in started] == ["10.0.0.1:15000"] * 2
    assert [kwargs["base_gpu_id"] for kwargs in started] == [3, 1]  # the GPUs of slots 4 and 6
    assert started[0]["num_gpus"] == 4


def test_what_its_group_says_reaches_its_process(cluster: Cluster) -> None:
    actor = Actor(wait_ready=Ref(INFO))
    overrides = {"model_path": "/models/judge", "mem_fraction_static": 0.5}
    engine_of(actor, model="judge", update_weights=False, offload=True, overrides=overrides).start()
    placement = next(kwargs for name, _, kwargs in actor.calls if name == "start")
    assert placement["name"] == "engine 3 of model judge"
    assert (placement["update_weights"], placement["offload"], placement["overrides"]) == (False, True, overrides)
    assert placement["worker_type"] == "regular"


def test_all_nodes_of_a_prefill_engine_register_at_one_port(cluster: Cluster) -> None:
    first = Actor(rendezvous=Ref("10.0.0.1:15000"), free_port=Ref(15001), wait_ready=Ref(INFO))
    second, alone = Actor(), Actor(wait_ready=Ref(INFO))
    engine_of(first, second, worker_type="prefill").start()
    engine_of(alone, worker_type="prefill").start()  # chooses one for itself
    ports = [next(kwargs for name, _, kwargs in actor.calls if name == "start") for actor in (first, second, alone)]
    assert [kwargs["bootstrap_port"] for kwargs in ports] == [15001, 15001, None]


def test_the_node_that_does_not_start_is_named(cluster: Cluster) -> None:
    first = Actor(rendezvous=Ref("10.0.0.1:15000"), wait_ready=Ref(at=NEVER))
    second = Actor(wait_ready=Ref(RemoteFailure("EngineStartError: no memory"), at=5))
    with pytest.raises(RemoteFailure, match=r"(?s)no memory.*engine 3 node 1"):
        engine_of(first, second).start()


class TakenOnce(Actor):
    """Its first rendezvous is on a port that another process takes."""

    def __getattr__(self, name: str) -> Any:
        if name == "wait_ready":
            first = not any(call == "stop" for call, _, _ in self.calls)
            answer = Ref(RemoteFailure("EngineStartError: exited", data={"port_taken": True}))
            self.answers[name] = answer if first else Ref(INFO)
        return super().__getattr__(name)


def test_an_engine_of_two_nodes_that_lost_a_port_is_started_again_as_a_whole(cluster: Cluster, caplog: Any) -> None:
    actors = TakenOnce(rendezvous=Ref("10.0.0.1:15000")), Actor(wait_ready=Ref(INFO))
    assert engine_of(*actors).start() == INFO
    for actor in actors:
        assert [name for name, _, _ in actor.calls if name in ("start", "stop")] == ["start", "stop", "start"]
    assert "engine 3: another process took one of its ports; starting all of it again" in caplog.text


def test_other_failures_of_an_engine_of_two_nodes_are_final(cluster: Cluster) -> None:
    first = Actor(rendezvous=Ref("10.0.0.1:15000"), wait_ready=Ref(RemoteFailure("EngineStartError: no memory")))
    with pytest.raises(RemoteFailure, match="no memory"):
        engine_of(first, Actor(wait_ready=Ref(INFO))).start()
    assert [name for name, _, _ in first.calls if name == "start"] == ["start"]


def test_what_follows_the_port_of_a_rendezvous_is_free_for_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []

    def reserve(count: int, *, consecutive: bool = False) -> list[int]:
        asked.append((count, consecutive))
        return list(range(15000, 15000 + count))

    monkeypatch.setattr(engine_actor, "reserve_ports", reserve)
    actor = engine_actor.EngineActor.__new__(engine_actor.EngineActor)
    assert actor.rendezvous(True) == "127.0.0.1:15000"
    assert asked == [(14, True)]  # up to SGLang's DP_ATTENTION_HANDSHAKE_PORT_DELTA


def started(*actors: Actor) -> RayEngine:
    engine = engine_of(*actors)
    engine._actors = list(actors)
    engine._hosts = engine._nodes_of_slots()
    return engine


def test_it_has_ended_when_one_of_its_nodes_has(cluster: Cluster) -> None:
    assert started(Actor(), Actor()).poll() is None
    assert started(Actor(), Actor(poll=Ref("engine 3 exited with code 1."))).poll() == "engine 3 exited with code 1."
    gone = Actor(poll=Ref(ray.exceptions.ActorDiedError()))
    ended = started(Actor(), gone)
    assert "engine 3 node 1: its actor on 10.0.0.2 ended, and the engine with it." in str(ended.poll())
    assert ended.nodes() == {"n0", "n1"}
    cluster.alive.remove("n1")
    assert ended.poll() == "engine 3 node 1: its node 10.0.0.2 is gone, and the engine with it."


def test_slots_of_a_node_that_is_taken_away_are_lost_until_ray_has_moved_them(cluster: Cluster) -> None:
    draining: dict[str, int] = {}
    state = SimpleNamespace(get_draining_nodes=lambda: draining)
    cluster._private = SimpleNamespace(state=SimpleNamespace(state=state))  # type: ignore[attr-defined]
    slots, plan = ("pg", list(range(8)), [0] * 8), EnginePlan(3, 4, 4, 2, 2)
    assert engine_slots.slots_stay(slots, plan)
    draining["n1"] = 0
    assert not engine_slots.slots_stay(slots, plan)
    draining.clear()
    cluster.alive.remove("n1")
    assert not engine_slots.slots_stay(slots, plan)
    cluster.node_of |= dict.fromkeys((6, 7), "n0")
    assert engine_slots.slots_stay(slots, plan)


def test_an_actor_that_is_silent_is_warned_of_and_taken_to_run(cluster: Cluster, caplog: Any) -> None:
    silent = started(Actor(poll=Ref(at=NEVER), last_lines=Ref(at=NEVER)))
    assert silent.poll() is None
    assert cluster.now == POLL_DEADLINE_S
    assert "engine 3: the actor on 10.0.0.1 has not answered for 20 s" in caplog.text
    assert silent.last_lines() == []
    assert started(Actor(last_lines=Ref(["boom"]))).last_lines() == ["boom"]
    assert started().last_lines() == []


def test_its_end_is_asked_for_and_then_made(cluster: Cluster) -> None:
    stuck, willing = Actor(stop=Ref(at=NEVER)), Actor()
    engine = started(stuck, willing)
    engine.end()
    assert cluster.now == STOP_DEADLINE_S
    assert cluster.killed == [stuck, willing]
    engine.end()
    assert len(cluster.killed) == 2
    assert engine.poll() is None


def test_one_that_is_ended_before_it_starts_leaves_no_actor(cluster: Cluster) -> None:
    actor = Actor()
    engine = engine_of(actor)
    engine.end()
    with pytest.raises(RuntimeError, match="engine 3 was ended while it was being started"):
        engine.start()
    assert cluster.killed == [actor]
