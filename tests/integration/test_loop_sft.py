"""``train.py`` without engines: SFT, resume to the bit, failures and signals. Two real trainer ranks on two slots."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.run_train import Finished, Run, command_line, run_train, sft_file, sft_flags
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration
COMPARED = 4  # rollouts whose losses and last weights are compared; both runs continue after them
HOLD = ["--rollout-data-postprocess-path", "tests.support.rollout_hooks.hold"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("sft")
    base = sft_flags(make_tiny_checkpoint(root / "model"), sft_file(root / "sft.jsonl"))
    return [*base, "--actor-num-gpus-per-node", "2", "--num-rollout", "100000"]


def saving(root: Path) -> list[str]:
    words = ["--save", root, "--load", root, "--save-interval", "1", "--save-hf", root / "hf-{rollout_id}"]
    return list(map(str, words))


def weights(root: Path) -> bytes:
    return (root / f"hf-{COMPARED - 1}" / "model-00001-of-00001.safetensors").read_bytes()


def losses(run: Finished, count: int) -> list[float]:
    return run.values("train/loss")[:count]


@pytest.mark.soak
def test_a_killed_run_resumes_to_the_same_weights(flags, tmp_path):
    """Three runs, ended in three ways: SIGTERM, a killed driver, a killed rank."""
    # 6 of the 8 conversations of a rollout fill a step: the others are carried over, also over the restart.
    flags = [*flags, "--global-batch-size", "6"]
    steps = COMPARED * 8 // 6
    with Run([*flags, *saving(tmp_path / "whole")], tmp_path / "run") as run:
        run.wait_for(rf"rollout {COMPARED - 1} of 100000: .*loss", 120)
        run.wait_for(rf"rollout {COMPARED} of", 60)
        run.send(signal.SIGTERM)
        whole = run.finish_after_signal(30, 143)
    loss = losses(whole, steps)
    assert len(loss) == steps
    assert loss[-1] < loss[0]

    again = [*flags, *saving(tmp_path / "again"), *HOLD]
    with Run(again, tmp_path / "killed", env={"SLIME_TEST_HOLD_AT": "2"}) as run:
        run.wait_for(r"rollout 1 of", 120)
        run.wait_for_log("actor_rank1", "holding rollout 2", 60)
        assert any("torch_shm_manager" in command_line(pid) for pid in run.processes())
        run.process.kill()
        run.process.wait(10)
        assert run.assert_nothing_left() < 30

    with Run(again, tmp_path / "resumed") as run:
        run.wait_for(rf"rollout {COMPARED} of", 120)
        log = (tmp_path / "resumed" / "logs" / "actor_rank1.log").read_text()
        os.kill(int(re.search(r"actor_rank1 of run .*: pid (\d+)", log).group(1)), signal.SIGKILL)
        resumed = run.finish(30)
        assert resumed.returncode == 1
        run.assert_nothing_left(5)
    assert (tmp_path / "again" / "rollout" / "carried_over_1.json").exists()
    assert losses(resumed, steps - 2) == loss[2:]
    assert weights(tmp_path / "again") == weights(tmp_path / "whole")
    # The killed rank is named, not its neighbor that lost it.
    message = resumed.output[resumed.output.index("error: ") :].splitlines()
    assert re.match(r"error: actor rank 1 ended unexpectedly during .+: ", message[0])
    assert any(line.startswith("The last lines of ") and "actor_rank1.log" in line for line in message)


@pytest.mark.soak
def test_the_message_of_the_rank_that_failed_comes_first(flags, tmp_path):
    """On every change: tests/unit/ray/test_remote_failures.py."""
    hook = ["--rollout-data-postprocess-path", "tests.support.rollout_hooks.fail_on_rank_1"]
    failed = run_train([*flags, *hook], tmp_path / "run", returncode=1)
    reported = failed.output[failed.output.index("error: ") :].splitlines()
    assert reported[0] == "error: ValueError: the sauce is burnt in rank 1"
    where = "in --rollout-data-postprocess-path 'tests.support.rollout_hooks.fail_on_rank_1' ("
    assert reported[1].strip().startswith(where)
    assert reported[2].strip() == "in actor rank 1, during training on rollout 1"
    assert "fail_on_rank_1" in failed.output  # where in the code
    assert "ray/_private" not in failed.output
    assert len(failed.output.splitlines()) < 60
    assert "the sauce is burnt" in (failed.run_dir / "logs" / "failure.txt").read_text()


@pytest.mark.soak
def test_ctrl_c_ends_everything(flags, tmp_path):
    """On every change, of a run with engines: test_run_security.py."""
    with Run(flags, tmp_path / "run") as run:
        run.wait_for(r"rollout 2 of", 120)
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does
        run.finish_after_signal(30, 130)


@pytest.mark.soak
def test_a_driver_of_the_users_own(flags, tmp_path):
    """Without engines. On every change with them: test_own_driver.py."""
    script = "tests/support/own_driver.py"
    run = run_train([*flags, "--num-rollout", "2"], tmp_path / "run", script=script)
    assert "rollouts per epoch: None, start: 0, critic: False" in run.output
    assert len(run.values("train/loss")) == 2
