"""One rank as its actor drives it, with a trainer that notes what is asked of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils import parallel
from slime.ray import train_actor
from slime.ray.train_actor import TrainRayActor


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
