"""Starting actor and critic on the same slots, and going on from where both were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.ray.driver import placement_group
from slime.ray.driver.placement_group import create_training_models
from tests.support.arguments import dry
from tests.unit.ray.test_placement_group import FakeManager


class World:
    """Groups that only note what is done to them, and a manager."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, actor: int, critic: int) -> None:
        self.calls: list[str] = []
        self.args: dict[str, Any] = {}
        starts, world = {"actor": actor, "critic": critic}, self

        class Group:
            def __init__(self, args: Any, nodes: int, per_node: int, pg: Any, role: str = "actor", **_: Any) -> None:
                self.role, self.others = role, []
                world.args[role] = args

            def launch(self) -> None:
                world.calls.append(f"launch {self.role}")

            def create(self, manager: Any) -> int:
                world.calls.append(f"create {self.role}")
                return starts[self.role]

            def offload(self) -> None:
                world.calls.append(f"offload {self.role}")

            def connect(self, critic: Any) -> None:
                self.critic = critic

            def liveness(self) -> str:
                return f"liveness of {self.role}"

        monkeypatch.setattr(placement_group, "RayTrainGroup", Group)
        monkeypatch.setattr(placement_group, "wait_one", lambda ref, *_: ref.value)
        self.manager = FakeManager()

    def create(self, args: Any) -> Any:
        return create_training_models(args, {"actor": "slots", "critic": "slots"}, self.manager)  # type: ignore[dict-item]


def ppo(root: Path, *flags: Any) -> Any:
    save = root / "save"
    base = ("--advantage-estimator", "ppo", "--num-rollout", 9, "--save", save, "--load", save, "--save-interval", 1)
    return dry(*base, *flags)


def test_the_critic_sleeps_before_the_actor_takes_memory(monkeypatch, tmp_path):
    world = World(monkeypatch, actor=0, critic=0)
    actor, critic = world.create(ppo(tmp_path))
    assert world.calls == [
        "launch critic",
        "launch actor",
        "create critic",
        "offload critic",
        "create actor",
        "offload actor",
    ]
    assert (actor.others, critic.others) == (["liveness of critic"], ["liveness of actor"])
    assert actor.critic is critic  # for drivers that hand no values over
    assert world.args["critic"].save == f"{world.args['actor'].save}/critic"


def test_while_only_the_critic_is_trained_the_prompts_advance_too(monkeypatch, tmp_path):
    """``--load`` has no checkpoint of the actor then, and its weights come from elsewhere."""
    world = World(monkeypatch, actor=0, critic=3)
    critic = tmp_path / "save" / "critic"
    (critic / "iter_0000002").mkdir(parents=True)
    for name in ("metadata.json", ".metadata", "common.pt"):
        (critic / "iter_0000002" / name).touch()
    (critic / "latest_checkpointed_iteration.txt").write_text("2")
    args = ppo(tmp_path, "--num-critic-only-steps", 5)
    assert args.start_rollout_id == 0
    world.create(args)
    assert args.start_rollout_id == 3
    assert world.manager.calls == [("load", 2, str(tmp_path / "save"))]
    assert (world.args["critic"].ckpt_step, world.args["actor"].ckpt_step) == (2, None)


def test_a_start_that_was_given_is_kept(monkeypatch, tmp_path):
    world = World(monkeypatch, actor=0, critic=0)
    args = ppo(tmp_path, "--start-rollout-id", 7)
    world.create(args)
    assert args.start_rollout_id == 7


def test_roles_that_disagree_are_refused(monkeypatch, tmp_path):
    world = World(monkeypatch, actor=4, critic=2)
    with pytest.raises(RuntimeError, match="the actor's next rollout is 4 and the critic's is 2"):
        world.create(ppo(tmp_path))


def test_evaluation_alone_needs_no_critic(monkeypatch, tmp_path):
    world = World(monkeypatch, actor=0, critic=0)
    evaluation = ("--eval-interval", 1, "--eval-prompt-data", "a", "/b.jsonl")
    args = dry("--advantage-estimator", "ppo", "--num-rollout", 0, *evaluation)
    assert world.create(args)[1] is None
    assert world.calls == ["launch actor", "create actor", "offload actor"]
