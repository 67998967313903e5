"""The loop that a command line runs and its work between rollouts."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from slime.arguments import ArgumentError
from slime.arguments.groups.rollout import FULLY_ASYNC_ROLLOUT
from slime.arguments.rules.loop import refuse_impossible_loop
from slime.preflight.plan.loop import loop_of
from tests.support.arguments import dry


def rows(flags: str = "", *, overlap: bool = False) -> dict[str, str]:
    return dict(loop_of(dry(*shlex.split(flags)), overlap=overlap).rows)


def test_the_synchronous_loop() -> None:
    said = rows()
    assert said["loop"].startswith("train.py: generate, train,")
    assert said["trains"] == "the actor (grpo)"
    assert said["weight sync"] == (
        "all weights through a process group of trainers and engines, before the first and after every rollout"
    )
    assert said["checkpoints"] == "none are written (--save)"
    assert "taking turns" not in said
    assert "evaluation" not in said


def test_where_the_first_weights_come_from(tmp_path: Path) -> None:
    assert rows("--hf-checkpoint /m")["first weights"] == "/m"
    own = f"--hf-checkpoint /m --load {tmp_path} --save {tmp_path}/ --save-interval 1"
    assert rows(own)["first weights"] == f"/m, from rollout 0: --save {tmp_path}/ holds no checkpoint yet"
    for step in (3, 5):
        (tmp_path / f"iter_{step:07d}").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5\n")
    assert rows(own)["first weights"] == f"{tmp_path}, after rollout 5"
    assert rows(f"{own} --ckpt-step 3")["first weights"] == f"{tmp_path}, after rollout 3"
    assert rows(f"--load {tmp_path} --finetune")["first weights"] == str(tmp_path)


def test_the_overlapped_loop_syncs_between_generations() -> None:
    said = rows("--update-weights-interval 3", overlap=True)
    assert said["loop"].startswith("train_async.py:")
    assert said["weight sync"].endswith("before the first and after every 3 rollouts, between two generations")


def test_the_fully_asynchronous_loop() -> None:
    flags = f"--rollout-function-path {FULLY_ASYNC_ROLLOUT}"
    said = rows(flags, overlap=True)
    assert said["loop"].startswith("train_async.py: generation never stops")
    assert said["staleness"] == "tokens may be made by weights of any earlier step (--max-staleness)"
    assert said["weight sync"].endswith("while requests are in flight")
    bound = rows(f"{flags} --max-staleness 2", overlap=True)["staleness"]
    assert bound == "no token is trained on that lags more than 2 steps (--max-staleness)"
    with pytest.raises(ArgumentError, match=r"generates while the trainer trains.*use train_async\.py"):
        refuse_impossible_loop(dry(*shlex.split(flags)), overlap=False)
    refuse_impossible_loop(dry(*shlex.split(f"{flags} --debug-rollout-only")), overlap=False)


def test_the_bound_on_staleness_of_loops_that_wait_for_rollouts() -> None:
    assert "staleness" not in rows("", overlap=True)
    assert "lags more than 1 step " in rows("--max-staleness 1", overlap=True)["staleness"]
    refuse_impossible_loop(dry("--max-staleness", "0"), overlap=False)
    refuse_impossible_loop(dry(*shlex.split("--max-staleness 2 --update-weights-interval 2")), overlap=True)
    for flags, lag in (("--max-staleness 0", 1), ("--max-staleness 2 --update-weights-interval 3", 3)):
        with pytest.raises(ArgumentError, match=rf"generate_rollout lag {lag}; use at least {lag}, or slime\."):
            refuse_impossible_loop(dry(*shlex.split(flags)), overlap=True)


def test_a_refreshed_reference_must_be_in_a_checkpoint_that_trainers_restart_from() -> None:
    flags = "--release-train --save c --update-weight-transport disk --update-weight-disk-dir d --use-kl-loss"
    flags += " --ref-update-interval 2 --save-interval"
    refuse_impossible_loop(dry(*shlex.split(f"{flags} 10")), overlap=False)
    refuse_impossible_loop(dry(*shlex.split(f"{flags} 10 --update-weights-interval 2")), overlap=True)
    refuse_impossible_loop(dry(*shlex.split(f"{flags} 1 --update-weights-interval 3")), overlap=True)
    with pytest.raises(ArgumentError, match=r"none after every 2 rollouts; use a multiple of --update-weights-int"):
        refuse_impossible_loop(dry(*shlex.split(f"{flags} 10 --update-weights-interval 3")), overlap=True)


def test_weights_take_other_ways() -> None:
    assert "through shared memory" in rows("--colocate")["weight sync"]
    disk = rows("--update-weight-transport disk --update-weight-disk-dir /shared/weights")
    assert "through files in /shared/weights" in disk["weight sync"]


def test_taking_turns() -> None:
    both = rows("--colocate")["taking turns"]
    assert "--offload-train" in both
    assert "--offload-rollout" in both
    assert "--offload-rollout" not in rows("--colocate --no-offload-rollout")["taking turns"]


def test_what_is_trained() -> None:
    assert rows("--use-kl-loss --ref-load /ref")["trains"] == "the actor (grpo); the reference model for the KL is /ref"
    ppo = rows("--advantage-estimator ppo --num-critic-only-steps 5 --num-rollout 9")
    assert ppo["trains"] == "the actor (ppo) and a critic, alone in the first 5 rollouts"
    assert rows("--debug-rollout-only").keys() == {"loop"}


def test_evaluations() -> None:
    sets = "--eval-prompt-data aime a.jsonl math b.jsonl --eval-interval 5"
    both = "aime (1 sample per prompt), math (1 sample per prompt)"
    assert rows(sets)["evaluation"] == f"before rollout 0 and after every 5 rollouts: {both}"
    assert rows(f"{sets} --skip-eval-before-train")["evaluation"] == f"after every 5 rollouts: {both}"
    assert rows(sets, overlap=True)["evaluation"] == f"after every 5 rollouts: {both}"
    assert rows(f"{sets} --num-epoch 2")["evaluation"].endswith(f"after every 5 rollouts, every epoch: {both}")
    assert rows(f"{sets} --num-rollout 0")["evaluation"] == f"once: {both}"


def test_checkpoints() -> None:
    assert rows("--save /c --save-interval 1")["checkpoints"] == "after every rollout and at the end, to /c"
    exports = rows("--save /c --save-interval 4 --save-hf /hf/{rollout_id}")["checkpoints"]
    assert exports == "after every 4 rollouts and at the end, to /c; Hugging Face exports to /hf/{rollout_id}"
    assert "without --save-interval" in rows("--save /c")["checkpoints"]


@pytest.mark.parametrize("flag", ["--colocate", "--offload-train", "--offload-rollout"])
def test_the_overlapped_loop_takes_no_turns(flag: str) -> None:
    args = dry(flag)
    refuse_impossible_loop(args, overlap=False)
    with pytest.raises(ArgumentError, match=rf"^{flag} makes engines and trainers take turns"):
        refuse_impossible_loop(args, overlap=True)
