"""One rank as its actor drives it, with a trainer that notes what is asked of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime.ray import train_actor
from slime.ray.train_actor import TrainRayActor


class NotingTrainer:
    def __init__(self, asleep: bool) -> None:
        self.parallel_config = {"dp_rank": 1}
        self.asleep = asleep
        self.calls: list[str] = []

    def wake_up(self) -> None:
        assert self.asleep
        self.asleep = False
        self.calls.append("wake up")

    def sleep(self) -> None:
        assert not self.asleep
        self.asleep = True
        self.calls.append("sleep")

    def train(self, rollout_id: int, shard: Any, external_data: Any) -> str:
        assert not self.asleep
        self.calls.append(f"train {rollout_id} on {shard}")
        return "values"

    def save(self, rollout_id: int, *, force_sync: bool, export: bool) -> None:
        assert not self.asleep
        self.calls.append(f"save {rollout_id}")


@pytest.mark.parametrize("asleep", [False, True])
def test_a_trainer_that_sleeps_is_woken_for_its_work_alone(monkeypatch: pytest.MonkeyPatch, asleep: bool) -> None:
    monkeypatch.setattr(train_actor.ray, "get", lambda ref: ref)
    actor = TrainRayActor.__new__(TrainRayActor)
    actor.trainer = trainer = NotingTrainer(asleep)  # type: ignore[assignment]
    shards = [SimpleNamespace(inner=f"shard {rank}") for rank in range(2)]
    assert actor.train(3, shards) == "values"
    actor.save(3, False, True)
    expected = ["train 3 on shard 1", "save 3"]
    assert trainer.calls == (["wake up", expected[0], "sleep", "wake up", expected[1], "sleep"] if asleep else expected)
    assert trainer.asleep == asleep
