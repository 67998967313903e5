"""Six steps, killed in the fourth, and again with the same command: nothing is skipped, repeated or different."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest

from slime.rollout.debug_data import load_rollout
from tests.support.run_train import Finished, Run, rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]
STEPS = 6


def command(flags: list[str], root: Path) -> list[str]:
    words = [
        "--save",
        root / "save",
        "--load",
        root / "save",
        "--save-interval",
        1,
        "--save-hf",
        root / "hf-{rollout_id}",
    ]
    return [*flags, *map(str, words)]


def kill_in_step_4(flags: list[str], run_dir: Path) -> None:
    with Run(flags, run_dir, env={"SLIME_TEST_HOLD_AT": "3"}) as run:
        run.wait_for_log("actor_rank0", "holding rollout 3", 300)
        for pid in [run.process.pid, *run.processes()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait(10)
        run.assert_nothing_left()


def prompts(dumps: Path, rollout_id: int) -> list[tuple[int, int, str]]:
    return [(s.group_index, s.index, s.prompt) for s in load_rollout(dumps / f"{rollout_id}.pt")]


@pytest.mark.timeout(1800)
def test_resume_of_six_steps(tmp_path: Path):
    model = make_tiny_checkpoint(tmp_path / "model")
    # 10 prompts and 4 per rollout: the killed step lies in the second epoch, and epochs end within rollouts.
    extra = f"""--rollout-num-gpus 2 --num-rollout {STEPS} --rollout-shuffle --use-kl-loss --kl-loss-coef 0.1
        --custom-rm-path tests.support.rollout_hooks.parity_reward
        --rollout-data-postprocess-path tests.support.rollout_hooks.hold"""
    flags = [*rl_flags(model, sums_file(tmp_path / "sums.jsonl", 10)), *extra.split()]
    whole, again, replayed = tmp_path / "whole", tmp_path / "again", tmp_path / "replayed"

    dump = ["--save-debug-rollout-data", str(whole / "dumps" / "{rollout_id}.pt")]
    uninterrupted: Finished = run_train([*command(flags, whole), *dump], whole / "run")
    assert sorted(uninterrupted.metric("train/loss")) == list(range(STEPS))

    resuming = [*command(flags, again), "--save-debug-rollout-data", str(again / "dumps" / "{rollout_id}.pt")]
    kill_in_step_4(resuming, again / "killed")
    for generated_only in range(3, STEPS):
        (again / "dumps" / f"{generated_only}.pt").unlink(missing_ok=True)
    resumed = run_train(resuming, again / "resumed")
    assert sorted(resumed.metric("train/loss")) == [3, 4, 5]
    for rollout_id in range(STEPS):
        assert prompts(again / "dumps", rollout_id) == prompts(whole / "dumps", rollout_id)

    # The same rollouts, replayed with the kill in between, give the same parameters to the bit.
    replaying = [*command(flags, replayed), "--load-debug-rollout-data", str(whole / "dumps" / "{rollout_id}.pt")]
    kill_in_step_4(replaying, replayed / "killed")
    run_train(replaying, replayed / "resumed")
    for step in (3, 4, 5):
        name = f"hf-{step}/model-00001-of-00001.safetensors"
        assert (replayed / name).read_bytes() == (whole / name).read_bytes()
    shutil.rmtree(tmp_path)
