"""Slots in order of node and GPU, what is said when there are none, and what the flags of a run become."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from slime.ray import cluster
from slime.ray.cluster import SLOT, Cluster, slot_resources
from slime.ray.driver import placement_group
from slime.ray.driver.placement_group import PlacementError, create_placement_groups, create_training_models
from tests.support.arguments import run_args
from tests.support.fake_ray import FakeRay, Ref

NODES = {"n9": "10.0.0.9", "n10": "10.0.0.10", "n100": "10.0.0.100"}


class FakeGroup:
    """A placement group that is ready after ``ready_after`` seconds of a clock that its waits move."""

    def __init__(self, ready_after: float, clock: FakeRay) -> None:
        self.ready_after, self.clock = ready_after, clock

    def wait(self, timeout_seconds: float) -> bool:
        self.clock.now += timeout_seconds
        return self.clock.now >= self.ready_after


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cluster of three nodes; ``world.bundles`` says on which node each bundle is."""
    clock = FakeRay()
    here = SimpleNamespace(clock=clock, bundles=[], gpus={}, watched=[], removed=[], asked=None, ready_after=0.0)
    nodes = [
        {"NodeID": i, "NodeManagerAddress": a, "Alive": i != "n100", "Resources": {"CPU": 4.0}}
        for i, a in NODES.items()
    ]
    fake = SimpleNamespace(
        nodes=lambda: nodes,
        cluster_resources=lambda: {"CPU": 8.0, SLOT: 4.0},
        _private=SimpleNamespace(
            state=SimpleNamespace(available_resources_per_node=lambda: {"n9": {"CPU": 1.0}, "n10": {"CPU": 3.0}})
        ),
    )

    def reserve(bundles: list[dict[str, float]], strategy: str) -> FakeGroup:
        here.asked = (bundles, strategy)
        return FakeGroup(here.ready_after, clock)

    def table(pg: Any) -> dict[str, Any]:
        return {"bundles_to_node_id": {str(i): node for i, node in enumerate(here.bundles)}}

    monkeypatch.setattr(placement_group, "ray", fake)
    monkeypatch.setattr(placement_group, "time", clock)
    monkeypatch.setattr(placement_group, "placement_group", reserve)
    monkeypatch.setattr(placement_group, "placement_group_table", table)
    monkeypatch.setattr(placement_group, "remove_placement_group", here.removed.append)
    monkeypatch.setattr(placement_group, "_probe_gpus", lambda c, pg, slots: [here.gpus[b] for b in range(slots)])
    monkeypatch.setattr(Cluster, "watch_nodes", lambda self, nodes: here.watched.extend(nodes))
    return here


def connected(monkeypatch: pytest.MonkeyPatch, device: Any, *, own: bool = False) -> None:
    slot = slot_resources(device, has_slots=own)
    one = Cluster(run_id="r", own=own, device_type=device, slot=slot, node_id="9" * 56, janitor=None)  # type: ignore[arg-type]
    monkeypatch.setattr(cluster, "_current", one)
    monkeypatch.setattr(cluster, "on_node", lambda node_id: {"node": node_id})


def placed_args(**changes: Any) -> Any:
    base = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 3, "placement_timeout": 50.0}
    return run_args(**{**base, **changes})


def test_slots_are_ordered_by_node_address_and_gpu(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connected(monkeypatch, "cuda")
    world.bundles = ["n10", "n9", "n10", "n9", "n10"]
    world.gpus = {0: 2, 1: 7, 2: 0, 3: 1, 4: 1}
    groups = create_placement_groups(placed_args())
    pg, order, gpus = groups["actor"]
    assert world.asked == ([{"GPU": 1.0, "CPU": 1.0}] * 5, "PACK")
    assert order == [3, 1, 2, 4, 0]  # 10.0.0.9 before 10.0.0.10, by GPU on each
    assert gpus == [1, 7, 0, 1, 2]
    assert groups["critic"] == groups["actor"]
    assert groups["rollout"] == (pg, [2, 4, 0], [0, 1, 2])  # after the two of the trainers
    assert set(world.watched) == {"n9", "n10"}


@pytest.mark.parametrize(("device", "slots", "warns"), [("cpu", 14, False), ("cpu", 15, True), ("cuda", 15, False)])
def test_many_more_processes_than_cores_are_warned_of(
    device: str,
    slots: int,
    warns: bool,
    world: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The cluster has 8 cores; two slots train."""
    connected(monkeypatch, device)
    world.bundles, world.gpus = ["n9"] * (slots + 2), {i: i for i in range(slots + 2)}
    create_placement_groups(placed_args(rollout_num_gpus=slots))
    said = [m for m in caplog.messages if "are as many processes" in m]
    expected = "there is no GPU: 17 slots (2 train, 15 generate) are as many processes, which share 8 CPU cores"
    assert [m.partition(";")[0] for m in said] == ([expected] if warns else [])


def test_an_engine_that_would_lie_on_two_nodes_is_refused(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connected(monkeypatch, "cuda")
    world.bundles, world.gpus = ["n9", "n9", "n9", "n10", "n10"], {0: 0, 1: 1, 2: 2, 3: 0, 4: 1}
    with pytest.raises(PlacementError, match=r"engine 0 would get its 3 slots on 10\.0\.0\.9 and 10\.0\.0\.10"):
        create_placement_groups(placed_args(rollout_num_gpus_per_engine=3))
    connected(monkeypatch, "cpu")
    create_placement_groups(placed_args(rollout_num_gpus_per_engine=3))  # processes of two machines would do


def test_colocated_engines_get_the_trainers_slots(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connected(monkeypatch, "cuda")
    world.bundles, world.gpus = ["n9", "n9", "n9"], {0: 1, 1: 2, 2: 0}
    groups = create_placement_groups(placed_args(colocate=True))
    assert groups["actor"][1:] == groups["rollout"][1:] == ([2, 0, 1], [0, 1, 2])


def test_without_gpus_the_slots_of_a_node_are_numbered(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connected(monkeypatch, "cpu", own=False)
    world.bundles = ["n10", "n9", "n10", "n10", "n9"]
    _, order, gpus = create_placement_groups(placed_args())["actor"]
    assert world.asked[0] == [{"CPU": 0.01}] * 5
    assert order == [1, 4, 0, 2, 3]
    assert gpus == [0, 1, 0, 1, 2]


def test_nothing_to_reserve(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connected(monkeypatch, "cpu", own=True)
    groups = create_placement_groups(placed_args(debug_rollout_only=True, rollout_num_gpus=0))
    assert groups == dict.fromkeys(("actor", "critic", "rollout"), (None, [], []))
    assert world.asked is None


def test_slots_that_do_not_come_are_given_up_with_what_is_there(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connected(monkeypatch, "cuda")
    world.ready_after = 1e9
    with pytest.raises(PlacementError) as late:
        create_placement_groups(placed_args())
    text = str(late.value)
    assert text.startswith("5 slots of [GPU 1, CPU 1] are not placed within --placement-timeout 50 s.\n")
    assert (
        "2 for training (--actor-num-nodes x --actor-num-gpus-per-node), 3 for inference (--rollout-num-gpus)" in text
    )
    assert "node 10.0.0.9: CPU 4 (free: CPU 1)" in text
    assert "node 10.0.0.10: CPU 4 (free: CPU 3)" in text
    assert "10.0.0.100" not in text  # dead
    assert 50 < world.clock.now <= 52
    assert len(world.removed) == 1


def test_slots_that_come_late_are_taken(
    world: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connected(monkeypatch, "cpu")
    world.ready_after, world.bundles = 45.0, ["n9"] * 5
    with caplog.at_level("INFO", logger=placement_group.__name__):
        assert create_placement_groups(placed_args())["actor"][1] == [0, 1, 2, 3, 4]
    assert "waiting for 31 s" in caplog.text  # a sign of life on the way
    assert world.removed == []


def test_an_own_cluster_does_not_grow_so_nothing_waits_for_it(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connected(monkeypatch, "cpu", own=True)
    with pytest.raises(PlacementError, match=rf"5 slots of \[{SLOT} 1\] are more than this machine has \({SLOT}\)"):
        create_placement_groups(placed_args())
    assert world.clock.now == 0
    assert world.asked is None


class FakeManager:
    """A handle whose methods return references that are there at once, and remember how they were called."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.calls = answers, []  # type: tuple[dict[str, Any], list[Any]]

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Ref:
            self.calls.append((name, *args))
            return Ref(self.answers.get(name))

        return SimpleNamespace(remote=remote)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_group, "wait_one", lambda ref, peer, what, deadline, watch=(): ref.value)


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize(("given", "loaded", "start"), [(None, 4, 4), (0, 4, 0), (7, 4, 7)])
def test_the_prompts_go_where_the_checkpoint_is(
    monkeypatch: pytest.MonkeyPatch, given: int | None, loaded: int, start: int
) -> None:
    made: list[Any] = []

    class FakeTrainers:
        def __init__(self, args: Any, nodes: int, per_node: int, pg: Any, *, with_ref: bool) -> None:
            made.append((nodes, per_node, pg, with_ref))

        def launch(self) -> None: ...

        def create(self, manager: Any) -> int:
            return loaded

    monkeypatch.setattr(placement_group, "RayTrainGroup", FakeTrainers)
    manager = FakeManager()
    args = placed_args(start_rollout_id=given, rollout_global_dataset=True, kl_coef=0.0, use_kl_loss=True)
    trainers, critic = create_training_models(args, {"actor": "slots"}, manager)  # type: ignore[dict-item]
    assert isinstance(trainers, FakeTrainers)
    assert critic is None
    assert args.start_rollout_id == start
    assert manager.calls == [("load", start - 1)]
    assert made == [(1, 2, "slots", True)]  # --use-kl-loss needs the reference model


@pytest.mark.usefixtures("waits")
def test_a_reference_that_the_actor_s_entry_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class FakeTrainers:
        def __init__(self, args: Any, nodes: int, per_node: int, pg: Any, *, with_ref: bool) -> None:
            made.append((args.use_kl_loss, with_ref))

        def launch(self) -> None: ...

        def create(self, manager: Any) -> int:
            return 0

    monkeypatch.setattr(placement_group, "RayTrainGroup", FakeTrainers)
    args = placed_args(start_rollout_id=None, rollout_global_dataset=True, kl_coef=0.0, use_kl_loss=False)
    args.explicit_flags = frozenset()
    args.role_values = {"actor": {"use_kl_loss": True}}
    create_training_models(args, {"actor": "slots"}, FakeManager())  # type: ignore[dict-item]
    assert made == [(True, True)]


@pytest.mark.usefixtures("waits")
def test_without_training_there_are_no_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = FakeManager()
    args = placed_args(debug_rollout_only=True, start_rollout_id=None, rollout_global_dataset=False)
    assert create_training_models(args, {"actor": None}, manager) == (None, None)  # type: ignore[dict-item]
    assert args.start_rollout_id == 0
    assert manager.calls == [("load", -1)]


def start_manager(monkeypatch: pytest.MonkeyPatch, per_epoch: int | None, **flags: Any) -> tuple[Any, Any, FakeManager]:
    connected(monkeypatch, "cpu", own=True)
    monkeypatch.setattr(cluster.Cluster, "name_manager", lambda self, directory: {})
    manager = FakeManager(get_num_rollout_per_epoch=per_epoch)

    class Options:
        def options(self, **_: Any) -> Any:
            return SimpleNamespace(remote=lambda args: manager)

    monkeypatch.setattr(placement_group, "ray", SimpleNamespace(remote=lambda cls: Options()))
    args = placed_args(run_dir="/nowhere", rollout_batch_size=8, **flags)
    return args, placement_group.create_rollout_manager(args, (None, [], []))[1], manager


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("flags", [{"offload_rollout": True}, {"check_weight_update_equal": True}, {}])
def test_engines_make_room_before_trainers_are_built(monkeypatch: pytest.MonkeyPatch, flags: dict[str, bool]) -> None:
    prepared: list[Any] = []

    class Handle:
        def __init__(self, args: Any, manager: Any) -> None:
            self.prepare_engines = lambda: prepared.append(manager)

    monkeypatch.setattr(placement_group, "RolloutHandle", Handle)
    _, _, manager = start_manager(monkeypatch, None, num_epoch=None, num_rollout=7, **flags)
    assert prepared == ([manager] if flags else [])


@pytest.mark.usefixtures("waits")
def test_the_manager_finds_the_file_of_models_wherever_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    args, _, _ = start_manager(monkeypatch, 5, num_epoch=None, num_rollout=1, sglang_config="engines.yaml")
    assert args.sglang_config == os.path.abspath("engines.yaml")


@pytest.mark.usefixtures("waits")
def test_epochs_become_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    args, per_epoch, manager = start_manager(monkeypatch, 5, num_epoch=3, num_rollout=None)
    assert (args.num_rollout, per_epoch) == (15, 5)
    assert ("set_num_rollout", 15) in manager.calls


@pytest.mark.usefixtures("waits")
def test_a_number_of_rollouts_wins_and_epochs_keep_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    args, per_epoch, _ = start_manager(monkeypatch, 5, num_epoch=3, num_rollout=7)
    assert (args.num_rollout, per_epoch) == (7, 5)
    args, per_epoch, _ = start_manager(monkeypatch, 5, num_epoch=None, num_rollout=7)
    assert (args.num_rollout, per_epoch) == (7, None)


@pytest.mark.usefixtures("waits")
def test_prompts_that_fill_no_rollout_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--num-epoch 3: .* --rollout-batch-size 8"):
        start_manager(monkeypatch, 0, num_epoch=3, num_rollout=None)
