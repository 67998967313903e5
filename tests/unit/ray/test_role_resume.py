"""The checkpoints that actor and critic resume from when a run is killed between their checkpoints."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from slime.arguments.errors import ArgumentError
from slime.ray.driver.critic import agree_on_resume_step, first_rollout
from tests.support.arguments import run_args


def role(root: Path, name: str, saved: list[int], *, only: int = 0) -> Namespace:
    """Arguments of a role whose ``load`` has the checkpoints ``saved``."""
    folder = root / name
    for iteration in saved:
        directory = folder / f"iter_{iteration:07d}"
        directory.mkdir(parents=True)
        for file in ("metadata.json", ".metadata", "common.pt"):
            (directory / file).touch()
        (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return run_args(
        load=str(folder) if saved else "/hf",
        save=str(folder),
        ckpt_step=None,
        finetune=not saved,
        no_load_optim=not saved,
        no_load_rng=not saved,
        num_critic_only_steps=only,
    )


def agreed(root: Path, actor_saved: list[int], critic_saved: list[int], only: int = 0) -> tuple[int, int]:
    """Return the first rollouts that actor and critic would load."""
    actor, critic = role(root, "actor", actor_saved, only=only), role(root, "critic", critic_saved, only=only)
    agree_on_resume_step(actor, critic)
    starts = []
    for args, saved in ((actor, actor_saved), (critic, critic_saved)):
        last = saved[-1] if args.ckpt_step is None and saved else args.ckpt_step
        starts.append(0 if args.finetune or last is None else last + 1)
    assert first_rollout(actor, *starts) == starts[1]
    return starts[0], starts[1]


@pytest.mark.parametrize(
    ("actor_saved", "critic_saved", "only", "starts"),
    [
        ([], [], 0, (0, 0)),
        ([3, 7], [3, 7], 0, (8, 8)),
        ([3], [3, 7], 0, (4, 4)),  # killed while the actor was trained or saved
        ([], [3], 0, (0, 0)),  # ... before its first checkpoint
        ([], [0, 1], 5, (0, 2)),  # only the critic is trained so far
        ([], [0, 1, 2], 2, (0, 2)),  # killed in the actor's first step
        ([], [2], 2, (0, 0)),
        ([2], [0, 1, 2, 3], 2, (3, 3)),
        ([1, 3], [1, 2, 3, 4], 1, (4, 4)),
        # --num-critic-only-steps was raised: the actor is not trained on rollouts 4 to 6, and not saved
        ([2, 3], [0, 1, 2, 3, 4, 5], 7, (4, 6)),
        ([2, 3], [0, 1, 2, 3, 4, 5, 6], 7, (4, 7)),
        ([2, 3], [3, 4, 5, 6, 7], 7, (4, 7)),  # ... and killed in the actor's next step
        ([2, 3], [3, 7], 7, (4, 4)),
        ([2, 3, 7], [3, 5, 7], 7, (8, 8)),
        ([3, 7], [3, 7, 9], 20, (8, 10)),  # raised when the last run had been killed between both checkpoints
    ],
)
def test_both_resume_after_the_last_rollout_that_both_have(tmp_path, actor_saved, critic_saved, only, starts):
    assert agreed(tmp_path, actor_saved, critic_saved, only) == starts


def test_going_on_from_two_rollouts_is_said(tmp_path, caplog):
    agreed(tmp_path, [2, 3], [3, 4, 5], only=7)
    assert "the critic resumes after rollout 5 and the actor with its weights after rollout 3" in caplog.text
    assert "--num-critic-only-steps 7" in caplog.text


def test_an_actor_without_a_critic_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"after rollout 3 .* its critic has no checkpoint in .*critic"):
        agreed(tmp_path, [3], [])


def test_checkpoints_of_different_runs_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"ends after rollout 2 .* after rollout 3, and there is no rollout"):
        agreed(tmp_path, [2], [3])


def test_a_step_that_was_asked_for_is_kept(tmp_path):
    actor, critic = role(tmp_path, "actor", [1, 2]), role(tmp_path, "critic", [1, 2, 3])
    actor.ckpt_step = critic.ckpt_step = 1
    agree_on_resume_step(actor, critic)
    assert (actor.ckpt_step, critic.ckpt_step) == (1, 1)


@pytest.mark.parametrize(("saved", "only", "step"), [([0, 1, 2], 2, 1), ([2], 2, 100)])
def test_the_step_of_the_actors_first_weights_is_not_asked_of_the_critic(tmp_path, saved, only, step):
    actor, critic = role(tmp_path, "actor", [], only=only), role(tmp_path, "critic", saved, only=only)
    actor.ckpt_step = 100  # of --ref-load
    agree_on_resume_step(actor, critic)
    assert (actor.ckpt_step, critic.ckpt_step) == (100, step)
    assert critic.finetune == (critic.load == actor.load)


def test_what_was_loaded_must_agree():
    args = run_args(num_critic_only_steps=2)
    assert first_rollout(args, 5, 5) == 5
    assert first_rollout(args, 0, 2) == 2
    assert first_rollout(args, 1, 2) == 2
    for actor, critic in ((0, 3), (4, 3), (2, 1), (1, 3)):
        with pytest.raises(RuntimeError, match=f"next rollout is {actor} and the critic's is {critic}"):
            first_rollout(args, actor, critic)
