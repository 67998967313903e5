"""``train.py`` without engines: SFT, resume to the bit, failures and signals. Two real trainer ranks on two slots."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.run_train import Run, command_line, run_train, sft_file, sft_flags
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration
ROLLOUTS = 4
HOLD = ["--rollout-data-postprocess-path", "tests.support.rollout_hooks.hold"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("sft")
    base = sft_flags(make_tiny_checkpoint(root / "model"), sft_file(root / "sft.jsonl"))
    return [*base, "--actor-num-gpus-per-node", "2", "--num-rollout", str(ROLLOUTS)]


def saving(root: Path) -> list[str]:
    return [
        "--save",
        str(root),
        "--load",
        str(root),
        "--save-interval",
        "1",
        "--save-hf",
        str(root / "hf-{rollout_id}"),
    ]


def test_a_killed_run_resumes_to_the_same_weights(flags, tmp_path):
    # 6 of the 8 conversations of a rollout fill a step: the others are carried over, also over the restart.
    flags = [*flags, "--global-batch-size", "6"]
    whole = run_train([*flags, *saving(tmp_path / "whole")], tmp_path / "run")
    loss = whole.values("train/loss")
    assert len(loss) == ROLLOUTS * 8 // 6
    assert loss[-1] < loss[0]
    assert re.search(rf"rollout {ROLLOUTS - 1} of {ROLLOUTS}: .*loss", whole.output)

    again = [*flags, *saving(tmp_path / "again"), *HOLD]
    with Run(again, tmp_path / "killed", env={"SLIME_TEST_HOLD_AT": "2"}) as run:
        run.wait_for(r"rollout 1 of", 120)
        run.wait_for_log("actor_rank1", "holding rollout 2", 60)
        assert any("torch_shm_manager" in command_line(pid) for pid in run.processes())
        run.process.kill()
        run.process.wait(10)
        assert run.assert_nothing_left() < 30
    resumed = run_train(again, tmp_path / "resumed")
    assert (tmp_path / "again" / "rollout" / "carried_over_1.json").exists()
    assert resumed.values("train/loss") == loss[2:]
    last = f"hf-{ROLLOUTS - 1}/model-00001-of-00001.safetensors"
    assert (tmp_path / "again" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()


def test_the_message_of_the_rank_that_failed_comes_first(flags, tmp_path):
    hook = ["--rollout-data-postprocess-path", "tests.support.rollout_hooks.fail_on_rank_1"]
    failed = run_train([*flags, *hook], tmp_path / "run", returncode=1)
    told = failed.output[failed.output.index("error: ") :].splitlines()
    assert told[0] == "error: ValueError: the sauce is burnt in rank 1"
    where = "in --rollout-data-postprocess-path 'tests.support.rollout_hooks.fail_on_rank_1' ("
    assert told[1].strip().startswith(where)
    assert told[2].strip() == "in actor rank 1, during training on rollout 1"
    assert "fail_on_rank_1" in failed.output  # where in the code
    assert "ray/_private" not in failed.output
    assert len(failed.output.splitlines()) < 60
    assert "the sauce is burnt" in (failed.run_dir / "logs" / "failure.txt").read_text()


def test_a_killed_rank_is_named_not_its_neighbour_that_lost_it(flags, tmp_path):
    with Run([*flags, "--num-rollout", "100000"], tmp_path / "run") as run:
        run.wait_for(r"rollout 2 of", 120)
        log = (tmp_path / "run" / "logs" / "actor_rank1.log").read_text()
        os.kill(int(re.search(r"actor_rank1 of run .*: pid (\d+)", log).group(1)), signal.SIGKILL)
        ended = run.finish(30)
        assert ended.returncode == 1
        run.assert_nothing_left(5)
    told = ended.output[ended.output.index("error: ") :].splitlines()
    assert re.match(r"error: actor rank 1 ended unexpectedly during .+: ", told[0])
    assert any(line.startswith("The last lines of ") and "actor_rank1.log" in line for line in told)


@pytest.mark.parametrize(
    ("signum", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak), (signal.SIGTERM, 143)]
)  # Ctrl-C: test_loop_fully_async.py too
def test_signals_end_everything(flags, tmp_path, signum, code):
    with Run([*flags, "--num-rollout", "100000"], tmp_path / "run") as run:
        run.wait_for(r"rollout 2 of", 120)
        if signum == signal.SIGINT:
            os.killpg(run.process.pid, signum)  # as a terminal does
        else:
            run.send(signum)
        ended = run.finish(30)
        assert ended.returncode == code
        assert "Traceback" not in ended.output
        assert "SystemError" not in ended.output
        run.assert_nothing_left(5)


def test_a_driver_of_the_users_own(flags, tmp_path):
    """The three public functions, used the way scripts written for slime <= 0.3.1 use them."""
    script = "tests/support/own_driver.py"
    run = run_train([*flags, "--num-rollout", "2"], tmp_path / "run", script=script)
    assert "rollouts per epoch: None, start: 0, critic: False" in run.output
    assert len(run.values("train/loss")) == 2
