"""The calls of training loops that were written for earlier releases: the same work, references where they wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from slime.arguments.device import finalize_for_device
from slime.ray.actors import train_actor
from slime.ray.actors.train_actor import TrainRayActor
from slime.ray.driver import placement_group, train_group
from slime.ray.driver.rollout_handle import ManagerAndEpoch
from slime.ray.driver.train_group import RayTrainGroup
from tests.support.arguments import dry, run_args
from tests.support.fake_ray import FakeRay
from tests.unit.ray.test_rollout_handle import Remote, clock, make_group, one_node
from tests.unit.ray.test_train_actor import NotingTrainer

__all__ = ["clock", "one_node"]


def ready(*ranks: Remote) -> RayTrainGroup:
    """A group whose processes are there."""
    group = make_group(list(ranks))
    group.launch = lambda: None  # type: ignore[method-assign]
    return group


def a_rank(start: int = 3) -> Remote:
    return Remote(master=("127.0.0.1", 20001), init=start, layout={"dp_size": 2})


@pytest.mark.usefixtures("one_node")
def test_async_init_answers_with_the_first_rollout_of_every_rank(clock: FakeRay) -> None:
    ranks = [a_rank(), a_rank()]
    group, args = ready(*ranks), dry("--run-dir", "/nowhere")
    refs = group.async_init(args, role="actor", with_ref=True)
    assert [clock.get(ref) for ref in refs] == [3, 3]
    assert all(("init", ("127.0.0.1", 20001), True) in rank.calls for rank in ranks)
    assert (group.role, group.args) == ("actor", args)
    manager = Remote()
    assert group.async_init_weight_update_connections(ManagerAndEpoch((manager, 5))) == []
    assert ("set_train_parallel_config", {"dp_size": 2}) in manager.calls
    group.set_rollout_manager(manager)  # once more, as some do: nothing is passed twice
    assert manager.names == ["set_train_parallel_config"]


@pytest.mark.usefixtures("one_node")
def test_the_first_push_counts_as_the_weights_that_the_run_starts_with(clock: FakeRay) -> None:
    rank = a_rank(4)
    rank.answers["update_weights"] = 1
    group, args = ready(rank), dry("--run-dir", "/nowhere")
    args.start_rollout_id = None  # with a checkpoint the loop sets it after this call, on arguments of its own
    group.async_init(args, "actor")
    manager = Remote(get_updatable_engines=["engine"], recover_updatable_engines=0)
    group.set_rollout_manager(manager)
    assert group.async_update_weights() == []
    assert ("weights_updated", 1, 4) in manager.calls


@pytest.mark.usefixtures("one_node")
def test_a_critic_is_started_with_its_own_arguments_and_tells_no_layout() -> None:
    group = ready(a_rank())
    group.async_init(dry("--advantage-estimator", "ppo", "--run-dir", "/nowhere"), role="critic")
    assert (group.role, group.args.loss_type) == ("critic", "value_loss")
    manager = Remote()
    group.set_rollout_manager(manager)
    assert manager.names == []


@pytest.mark.parametrize("offload", [False, True])
def test_a_rank_sleeps_after_init_where_engines_take_its_memory(monkeypatch: Any, offload: bool) -> None:
    monkeypatch.setattr(TrainRayActor, "setup", lambda self, master, with_ref: (7, {}))
    actor = TrainRayActor.__new__(TrainRayActor)
    actor.args = SimpleNamespace(offload_train=offload)  # type: ignore[assignment]
    actor.trainer = trainer = NotingTrainer(offloaded=False)  # type: ignore[assignment]
    assert actor.init(("h", 1), False) == 7
    assert trainer.offloaded == offload
    assert actor.layout() == {"dp_rank": 1}


def test_a_connected_critic_gives_the_actor_its_values(clock: FakeRay) -> None:
    ranks = [Remote(), Remote()]
    actor, critic = make_group(ranks), make_group([Remote(train="v0"), Remote(train="v1")])
    actor.connect(critic)
    values = critic.async_train(5, ["shard"])
    actor.async_train(5, ["shard"])
    assert [rank.calls[-1] for rank in ranks] == [("train", 5, ["shard"], value) for value in values]
    actor.async_train(6, ["shard"])  # on which the critic was not trained: the ranks say what is missing
    assert ranks[0].calls[-1] == ("train", 6, ["shard"], None)
    mine = ["a", "b"]
    actor.async_train(5, ["shard"], external_data=mine)
    assert [rank.calls[-1][3] for rank in ranks] == mine


def test_lists_of_references_are_empty_when_all_is_done(clock: FakeRay) -> None:
    rank = Remote()
    group = make_group([rank])
    assert (group.async_save_model(4), group.async_offload(), group.async_onload()) == ([], [], [])
    assert [call for call in rank.calls if call[0] != "drain_records"] == [
        ("save", 4, False, True),
        ("sleep",),
        ("wake_up",),
    ]


@pytest.mark.parametrize(
    ("rollout_function", "synchronous"),
    [("slime.rollout.sglang_rollout.generate_rollout", True),
     ("slime.rollout.fully_async_rollout.generate_rollout_fully_async", False)],
)  # fmt: skip
def test_requests_in_flight_are_not_aborted_for_a_rollout_that_always_generates(
    clock: FakeRay, rollout_function: str, synchronous: bool
) -> None:
    rank = Remote(update_weights=1)
    manager = Remote(get_updatable_engines=["engine"], recover_updatable_engines=0)
    group = make_group([rank], manager, rollout_function_path=rollout_function)
    group.update_weights()
    assert ("update_weights", ["engine"], synchronous) in rank.calls


def test_a_pair_that_is_also_the_manager() -> None:
    manager = Remote(generate="boxes", get_num_rollout_per_epoch=5)
    both = ManagerAndEpoch((manager, 5))
    handle, per_epoch = both
    assert (handle, per_epoch) == (manager, 5)
    assert both.controller is both.data_buffer is manager
    assert both.async_generate(3).value == "boxes"
    assert both.get_num_rollout_per_epoch.remote().value == 5
    for call in (lambda: both.async_eval(3), both.async_offload, lambda: both.async_onload(["weights"])):
        call()
    assert manager.calls[2:] == [("eval", 3), ("offload",), ("onload", ["weights"])]


def test_groups_by_the_names_of_earlier_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    args = dry("--actor-num-nodes", 2, "--use-kl-loss", "--kl-loss-coef", 0.1)
    slots = (None, [], [])
    with pytest.warns(DeprecationWarning, match="create_training_models"):
        group = placement_group.create_actor_group(args, slots, wandb_run_id="x")
    assert (group.world_size, group.role, group.with_ref) == (2 * args.actor_num_gpus_per_node, "actor", True)
    group = placement_group.allocate_train_group(
        args=args, num_nodes=1, num_gpus_per_node=4, pg=slots, wandb_run_id="x"
    )
    assert (group.world_size, group.role, group.with_ref) == (4, "actor", True)
    critic = placement_group.allocate_train_group(
        dry("--advantage-estimator", "ppo"), num_nodes=1, num_gpus_per_node=4, pg=slots, role="critic"
    )
    assert (critic.role, critic.with_ref, critic.args.loss_type) == ("critic", False, "value_loss")
    monkeypatch.setattr(placement_group, "create_rollout_manager", lambda args, pg, wandb_run_id: (pg, wandb_run_id))
    with pytest.warns(DeprecationWarning, match="create_rollout_manager"):
        assert placement_group.create_rollout_group(args, "pg", wandb_run_id="x") == ("pg", "x")  # type: ignore[arg-type]


def test_the_share_of_a_slot_is_the_caller_s(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    here = SimpleNamespace(tensor_transport=lambda args, extra: {}, share_of_slot=lambda part: asked.append(part) or {})
    made = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *a: MagicMock()))
    monkeypatch.setattr(train_group.cluster, "current", lambda: here)
    monkeypatch.setattr(train_group.cluster, "on_slot", lambda pg, bundle: None)
    monkeypatch.setattr(train_group, "ray", SimpleNamespace(remote=lambda cls: made))
    args = run_args(run_dir="r")
    finalize_for_device(args, "cpu")
    for more in ({}, {"num_gpus_per_actor": 1.0}):
        RayTrainGroup(args=args, num_nodes=1, num_gpus_per_node=1, pg=(None, [0], [0]), **more).launch()
    assert asked == [0.4, 1.0]
    assert train_actor.TrainRayActor is train_group.TrainRayActor
