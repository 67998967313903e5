"""One rank as its actor drives it, with a trainer that notes what is asked of it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from slime.arguments.device import finalize_for_device
from slime.backends.megatron_utils.state import parallel
from slime.ray.actors import train_actor
from slime.ray.actors.train_actor import TrainRayActor
from slime.ray.driver import train_group
from slime.ray.driver.train_group import RayTrainGroup
from tests.support.arguments import run_args


class NotingTrainer:
    def __init__(self, offloaded: bool) -> None:
        self.parallel_config = {"dp_rank": 1}
        self.offloaded = offloaded
        self.calls: list[str] = []

    def onload(self) -> None:
        assert self.offloaded
        self.offloaded = False
        self.calls.append("onload")

    def offload(self) -> None:
        assert not self.offloaded
        self.offloaded = True
        self.calls.append("offload")

    def train(self, rollout_id: int, shard: Any, external_data: Any) -> str:
        assert not self.offloaded
        self.calls.append(f"train {rollout_id} on {shard}")
        return "values"

    def save(self, rollout_id: int, *, force_sync: bool, export: bool) -> None:
        assert not self.offloaded
        self.calls.append(f"save {rollout_id}")


@pytest.mark.parametrize("offloaded", [False, True])
def test_an_offloaded_trainer_is_onloaded_for_its_work_alone(monkeypatch: pytest.MonkeyPatch, offloaded: bool) -> None:
    monkeypatch.setattr(train_actor.ray, "get", lambda ref: ref)
    actor = TrainRayActor.__new__(TrainRayActor)
    actor.trainer = trainer = NotingTrainer(offloaded)  # type: ignore[assignment]
    actor.args = SimpleNamespace(rollout_data_transport="object-store")  # type: ignore[assignment]
    shards = [SimpleNamespace(inner=f"shard {rank}") for rank in range(2)]
    assert actor.train(3, shards) == "values"
    actor.save(3, False, True)
    expected = ["train 3 on shard 1", "save 3"]
    assert trainer.calls == (
        ["onload", expected[0], "offload", "onload", expected[1], "offload"] if offloaded else expected
    )
    assert trainer.offloaded == offloaded


@pytest.mark.parametrize(
    ("cores", "nodes", "expected"),
    [(8, ["here"], 8), (8, ["here", "here", "there"], 4), (2, ["here"] * 3, 1), (7, ["there", "here", "here"], 3)],
)
def test_ranks_share_the_cores_of_their_node(
    monkeypatch: pytest.MonkeyPatch, cores: int, nodes: list[str], expected: int
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(train_actor, "usable_cores", lambda: cores)
    monkeypatch.setattr(parallel, "gather_from_world", lambda value: nodes)
    train_actor.set_threads_to_share("here")
    assert threads == [expected]


@pytest.mark.parametrize("share_all_cores", [False, True])
def test_a_rank_sets_its_threads_once_it_knows_the_others(
    monkeypatch: pytest.MonkeyPatch, share_all_cores: bool
) -> None:
    calls: list[str] = []
    trainer = SimpleNamespace(initialize=lambda: calls.append("initialize") or 4, parallel_config={"dp_rank": 0})
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(train_actor, "own_gpu_index", lambda: 0)
    monkeypatch.setattr(train_actor, "trainer_class", lambda role: lambda *_, **__: trainer)
    monkeypatch.setattr(train_actor, "set_threads_to_share", lambda node: calls.append(f"share {node}"))
    node = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(train_actor, "ray", SimpleNamespace(get_runtime_context=lambda: node))
    monkeypatch.setattr(train_actor.worker, "begin", lambda args, name: None)
    actor = TrainRayActor(SimpleNamespace(device_type="cuda"), "actor", 0, 1, share_all_cores)  # type: ignore[arg-type]
    assert actor.setup(("h", 1), False) == (4, {"dp_rank": 0})
    assert calls == ["initialize", *(["share here"] if share_all_cores else [])]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_ranks_on_cpus_share_cores(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    started: list[tuple[Any, ...]] = []
    here = SimpleNamespace(tensor_transport=lambda args, extra: {}, share_of_slot=lambda part: {}, device_type=device)
    made = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *a: started.append(a) or MagicMock()))
    monkeypatch.setattr(train_group.cluster, "current", lambda: here)
    monkeypatch.setattr(train_group.cluster, "on_slot", lambda pg, bundle: None)
    monkeypatch.setattr(train_group, "ray", SimpleNamespace(remote=lambda cls: made))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    args = run_args(run_dir="r", debug_train_only=True)
    finalize_for_device(args, device)
    RayTrainGroup(args, 1, 2, (None, [0, 1], [0, 1])).launch()
    assert [inputs[1:] for inputs in started] == [("actor", rank, 2, device == "cpu") for rank in range(2)]
