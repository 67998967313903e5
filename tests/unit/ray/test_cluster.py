"""Slots, the arguments that actors are started with, and a connection that fails leaves nothing behind."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from typing import Any

import pytest
import ray

from slime.ray import cluster
from slime.ray.cluster import SLOT, Cluster, describe_resources, device_of_cluster, slot_resources
from slime.ray.driver.program import handle_sigterm
from tests.support.arguments import run_args

HERE = "a1" * 28
"""The id of this node, in the form that Ray checks."""


def make_cluster(device: Any = "cpu", *, has_slots: bool = True, janitor: Any = None) -> Cluster:
    return Cluster(
        run_id="r1",
        own=True,
        device_type=device,
        slot=slot_resources(device, has_slots=has_slots),
        node_id=HERE,
        janitor=janitor,
    )


@pytest.fixture(autouse=True)
def fork_servers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The fork servers that were started: the socket, and whether engines take adapters."""
    started: list[tuple[str, bool]] = []

    def start(path: str, base: dict[str, str], *, takes_adapters: bool) -> None:
        assert base["PYTHONPATH"] == make_cluster().environment()["env_vars"]["PYTHONPATH"]
        started.append((path, takes_adapters))

    monkeypatch.setattr(cluster.engine_forks, "start_fork_server", start)
    monkeypatch.setattr(cluster, "has_cuda_device", lambda: False)
    monkeypatch.setenv("SLIME_ENGINE_FORK_SERVER", "that of an earlier run")
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    return started


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``_join_or_start`` start and change nothing."""
    monkeypatch.setattr(cluster.os, "environ", dict(os.environ))
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    for name in ("_start_twice", "_keep_sigterm_handler", "_use_loopback", "_require_listener"):
        monkeypatch.setattr(cluster, name, lambda *_: None)


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize(
    ("fields", "env", "adapters"),
    [
        ({}, {}, False),
        ({"lora_rank": 8, "lora_sync": "adapter"}, {"SLIME_ACCELERATOR": "cpu"}, True),
        ({"debug_train_only": True}, {}, None),
        ({"rollout_external": True}, {}, None),
        ({}, {"SLIME_ACCELERATOR": "cuda"}, None),
        ({}, {"SLIME_ENGINE_FORK_SERVER": ""}, None),
    ],
)
def test_engines_of_a_cluster_of_ones_own_are_forked_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, fork_servers: Any, fields: Any, env: dict[str, str], adapters: bool | None
) -> None:
    os.environ.update(env)
    args = run_args(ray_address=None)
    vars(args).update(fields)
    assert cluster._join_or_start(args, "r1", 2)
    path = str(cluster.private_directory() / "r1.forks")
    assert fork_servers == ([] if adapters is None else [(path, adapters)])
    assert os.environ.get("SLIME_ENGINE_FORK_SERVER") == (None if adapters is None else path)


@pytest.mark.usefixtures("without_ray")
def test_engines_of_a_host_with_gpus_and_of_a_cluster_that_was_joined_are_not_forked(
    monkeypatch: pytest.MonkeyPatch, fork_servers: Any
) -> None:
    monkeypatch.setattr(cluster, "has_cuda_device", lambda: True)
    assert cluster._join_or_start(run_args(ray_address=None), "r1", 2)
    monkeypatch.setattr(cluster, "has_cuda_device", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", lambda **_: None)
    assert not cluster._join_or_start(run_args(ray_address="10.0.0.1:6379"), "r1", 2)
    assert fork_servers == []
    assert "SLIME_ENGINE_FORK_SERVER" not in os.environ


def test_device_of_the_cluster() -> None:
    assert device_of_cluster({"CPU": 2.0}, None) == "cpu"
    assert device_of_cluster({"CPU": 2.0, "GPU": 0.0}, None) == "cpu"
    assert device_of_cluster({"CPU": 2.0, "GPU": 8.0}, None) == "cuda"
    assert device_of_cluster({"CPU": 2.0, "GPU": 8.0}, "cpu") == "cpu"
    assert device_of_cluster({"CPU": 2.0}, "cuda") == "cuda"
    assert device_of_cluster({"CPU": 2.0, "GPU": 8.0}, "musa") == "cuda"


def test_what_a_slot_reserves() -> None:
    assert slot_resources("cuda", has_slots=False) == {"GPU": 1.0, "CPU": 1.0}
    assert slot_resources("cpu", has_slots=True) == {SLOT: 1.0}
    assert slot_resources("cpu", has_slots=False) == {"CPU": 0.01}


def test_shares_of_a_slot() -> None:
    assert make_cluster("cuda").share_of_slot(0.4) == {"num_cpus": 0.4, "num_gpus": 0.4}
    assert make_cluster("cpu").share_of_slot(0.4) == {"num_cpus": 0, "resources": {SLOT: 0.4}}
    assert make_cluster("cpu", has_slots=False).share_of_slot(0.4) == {"num_cpus": 0.004}


@pytest.mark.parametrize(("device", "has_slots"), [("cuda", False), ("cpu", True), ("cpu", False)])
def test_trainer_critic_and_engine_fit_on_one_slot(device: str, has_slots: bool) -> None:
    here = make_cluster(device, has_slots=has_slots)
    taken: dict[str, float] = {"GPU": 0.0, "CPU": 0.0, SLOT: 0.0}
    for share in (0.4, 0.4, 0.2):  # actor, critic, engine
        options = here.share_of_slot(share)
        taken["CPU"] += options["num_cpus"]
        taken["GPU"] += options.get("num_gpus", 0)
        taken[SLOT] += options.get("resources", {}).get(SLOT, 0)
    assert all(amount <= here.slot.get(name, 0.0) + 1e-9 for name, amount in taken.items())


def test_actors_know_the_run_and_see_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    env = make_cluster().environment({"MINE": "1", "RAY_USE_UVLOOP": "1"})["env_vars"]
    assert env["SLIME_RUN_ID"] == "r1"
    for name in ("CUDA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES", "NEURON_RT_VISIBLE_CORES", "TPU_VISIBLE_CHIPS"):
        assert env[f"RAY_EXPERIMENTAL_NOSET_{name}"] == "1"
    assert env["MINE"] == "1"
    assert env["RAY_USE_UVLOOP"] == "1"  # what is asked for wins
    first, *rest = env["PYTHONPATH"].split(os.pathsep)
    assert os.path.isfile(os.path.join(first, "slime", "driver.py"))
    assert rest == ["/of/the/user"]
    assert env["OMP_NUM_THREADS"] == "1"  # the cores are shared
    assert "OMP_NUM_THREADS" not in make_cluster("cuda").environment()["env_vars"]


@pytest.mark.parametrize("chosen", [None, "checkout"])
def test_actors_take_megatron_from_where_the_driver_does(monkeypatch: pytest.MonkeyPatch, chosen: str | None) -> None:
    monkeypatch.delenv("SLIME_MEGATRON_CORE", raising=False)
    if chosen:
        monkeypatch.setenv("SLIME_MEGATRON_CORE", chosen)
    assert make_cluster().environment()["env_vars"].get("SLIME_MEGATRON_CORE") == chosen


def test_what_passes_secrets_on_reaches_the_processes_of_a_cluster_that_was_joined(monkeypatch) -> None:
    monkeypatch.setenv("SLIME_PASS_SECRETS", "HF_TOKEN")
    assert make_cluster().environment()["env_vars"]["SLIME_PASS_SECRETS"] == "HF_TOKEN"


def test_resources_on_one_line() -> None:
    shown = describe_resources({"memory": 1e9, "GPU": 8.0, "CPU": 64.0, "node:10.0.0.1": 1.0})
    assert shown == "CPU 64, GPU 8"
    assert describe_resources({}) == "no CPU, no GPU"


def test_before_connect_there_is_no_cluster() -> None:
    assert not cluster.is_connected()
    with pytest.raises(RuntimeError, match="connect"):
        cluster.current()


class FakeJanitor:
    def __init__(self, tag: str) -> None:
        self.tag, self.swept = tag, 0

    def sweep(self) -> None:
        self.swept += 1


@pytest.fixture
def janitors(monkeypatch: pytest.MonkeyPatch) -> list[FakeJanitor]:
    started: list[FakeJanitor] = []

    def start(tag: str) -> FakeJanitor:
        started.append(FakeJanitor(tag))
        return started[-1]

    monkeypatch.setattr(cluster, "start_janitor", start)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    return started


def test_a_cluster_that_cannot_be_joined_leaves_no_janitor(
    monkeypatch: pytest.MonkeyPatch, janitors: list[FakeJanitor]
) -> None:
    def refuse(**_: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", refuse)
    monkeypatch.setattr(cluster, "QUIET_RAY", {})
    with pytest.raises(ConnectionError, match=r"cannot join the Ray cluster '10\.0\.0\.1:6379' that --ray-address"):
        cluster.connect(run_args(ray_address="10.0.0.1:6379"), 2)
    assert [j.swept for j in janitors] == [1]
    assert not cluster.is_connected()


def test_the_variable_that_named_the_cluster_is_in_the_error(
    monkeypatch: pytest.MonkeyPatch, janitors: list[FakeJanitor]
) -> None:
    def refuse(**_: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", refuse)
    monkeypatch.setattr(cluster, "QUIET_RAY", {})
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    with pytest.raises(ConnectionError, match="environment variable RAY_ADDRESS"):
        cluster.connect(run_args(ray_address=None), 2)


BUSY = "The current node timed out during startup. This could happen because some of the raylet failed to startup"


@pytest.mark.parametrize(
    ("failures", "starts", "raised"),
    [([BUSY], 2, None), ([BUSY, BUSY], 2, BUSY), (["no space left on device"], 1, "no space left on device")],
)
def test_a_start_that_ray_gives_up_on_a_busy_machine_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch,
    janitors: list[FakeJanitor],
    caplog: pytest.LogCaptureFixture,
    failures: list[str],
    starts: int,
    raised: str | None,
) -> None:
    """The processes left by the first attempt are ended before the second one."""
    swept: list[int] = []
    pending = list(failures)

    def init(**_: Any) -> None:
        swept.append(sum(janitor.swept for janitor in janitors))
        if pending:
            raise Exception(pending.pop(0))

    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster, "_use_loopback", lambda: None)
    monkeypatch.setattr(cluster, "QUIET_RAY", {})
    monkeypatch.setattr(cluster.os, "environ", dict(os.environ))
    os.environ.pop("RAY_ADDRESS", None)
    with pytest.raises(Exception, match=raised) if raised else nullcontext():
        assert cluster._join_or_start(run_args(ray_address=None), "r1", 2)
    assert swept == list(range(starts))
    assert [janitor.tag for janitor in janitors] == ["SLIME_RUN_ID=r1"] * (starts - 1)
    assert ("is started once more" in caplog.text) == (starts == 2)


def test_shutdown_sweeps_once_everything_else_has_ended(
    monkeypatch: pytest.MonkeyPatch, janitors: list[FakeJanitor]
) -> None:
    order: list[str] = []
    janitor = FakeJanitor("t")
    janitor.sweep = lambda: order.append("sweep")  # type: ignore[method-assign]
    here = make_cluster(janitor=janitor)
    here.node_janitors["there"] = "actor there"
    monkeypatch.setattr(cluster, "_current", here)
    monkeypatch.setattr(cluster.ray, "kill", lambda actor: order.append(f"kill {actor}"))
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: order.append("ray.shutdown"))
    here.shutdown()
    assert order == ["kill actor there", "ray.shutdown", "sweep"]
    assert not cluster.is_connected()


def test_a_handler_of_sigterm_survives_the_start_of_ray(monkeypatch):
    """During ``ray.init`` Ray's own handler would end a run with exit code 15."""
    # as Ray's own does; that one may be replaced already, by a cluster that an earlier test has joined
    monkeypatch.setattr(
        ray._private.utils, "set_sigterm_handler", lambda handler: signal.signal(signal.SIGTERM, handler)
    )
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        cluster._keep_sigterm_handler()
        ray._private.utils.set_sigterm_handler(lambda *_: None)  # no handler is set: Ray's is used
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        handle_sigterm()
        ours = signal.getsignal(signal.SIGTERM)
        cluster._keep_sigterm_handler()
        ray._private.utils.set_sigterm_handler(lambda *_: None)
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)


def node(node_id: str, address: str, cpus: float, **more: float) -> dict[str, Any]:
    return {"NodeID": node_id, "Resources": {**more, f"node:{address}": 1.0, "CPU": cpus}}


@pytest.mark.parametrize(("device", "cpus"), [("cpu", 0.0), ("cuda", 2.0), ("cuda", 0.0)])
def test_what_the_run_ends_with_is_on_this_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str, cpus: float
) -> None:
    """Ray would put an actor that needs nothing on any node, with which the run would be lost."""
    head = {cluster.HEAD_NODE: 1.0}
    nodes = [node("b2" * 28, "10.0.0.2", 8.0), node(HERE, "10.0.0.1", cpus, **head)]
    monkeypatch.setattr(cluster.ray, "nodes", lambda: nodes)
    options = make_cluster(device).whole_cpu()
    where = options.pop("scheduling_strategy")
    assert where.node_id == HERE
    if device == "cpu":
        assert options == {"num_cpus": 0, "num_gpus": 0, "resources": {"node:10.0.0.1": 0.001}}
        assert not where.soft
    else:
        assert options == {"num_cpus": 1, "num_gpus": 0}
        assert where.soft  # a head node often has no CPU for Ray
    is_elsewhere = device == "cuda" and not cpus
    assert ("Ray has no CPU on this node" in caplog.text) is is_elsewhere


def test_nothing_is_placed_on_a_node_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [{"NodeID": HERE, "Resources": {}}])
    with pytest.raises(RuntimeError, match=f"the node {HERE} has left the Ray cluster"):
        cluster.on_node(HERE)
