"""The text of drivers written for slime <= 0.3.1 (``tests/support/own_driver*.py``), run as it is."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.megatron_checkout import make_checkout
from tests.support.run_train import rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

SCRIPT = "tests/support/own_driver.py"
ASYNC_SCRIPT = "tests/support/own_driver_async.py"
FIRST_SCRIPT = "tests/support/own_driver_0_1.py"
COMMON = "--num-rollout 2 --check-weight-update-equal --custom-rm-path tests.support.rollout_hooks.parity_reward"
ASYNC_SAVE = "--save-interval 1 --async-save"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("own_driver")
    checkpoint = make_tiny_checkpoint(folder / "model")
    evaluation = f"--eval-interval 2 --eval-prompt-data held_out {sums_file(folder / 'held_out.jsonl', count=4)}"
    return [*rl_flags(checkpoint, sums_file(folder / "sums.jsonl")), *COMMON.split(), *evaluation.split()]


def test_colocated(flags: list[str], tmp_path: Path) -> None:
    """It never says when a trainer is to sleep: they wake for their own time, and engines have the memory otherwise.

    As launch scripts do, it has a checkout of Megatron-LM on the PYTHONPATH, whose megatron.core does nothing.
    """
    extra = f"--colocate --save {tmp_path / 'save'} {ASYNC_SAVE}".split()
    path = os.pathsep.join([str(make_checkout(tmp_path / "Megatron-LM")), os.environ.get("PYTHONPATH", "")])
    run = run_train([*flags, *extra], tmp_path / "run", script=SCRIPT, env={"PYTHONPATH": path})
    assert f"not the copy in {tmp_path / 'Megatron-LM'}" in run.output
    assert re.search(r"rollouts per epoch: \S+, start: 0, critic: False", run.output)
    assert len(run.values("train/loss")) == len(run.values("rollout/raw_reward")) == 2
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert sorted(run.metric("eval/held_out")) == [0, 1]
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text().strip() == "1"
    log = (run.run_dir / "logs" / "actor_rank0.log").read_text()
    assert f"not that in {tmp_path / 'Megatron-LM' / 'megatron' / 'core'}" in log
    assert log.count("trainer offloaded") == 1 + 2 + 2  # at the start, and after every training and checkpoint


FULLY_ASYNC = "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async"


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(f"{FULLY_ASYNC} --save SAVE {ASYNC_SAVE}", marks=pytest.mark.soak),
        pytest.param(f"--save SAVE {ASYNC_SAVE}", marks=pytest.mark.soak),
        pytest.param(f"--advantage-estimator ppo --save SAVE {ASYNC_SAVE}", marks=pytest.mark.soak),
    ],
)
def test_asynchronous(flags: list[str], tmp_path: Path, extra: str) -> None:
    """It hands no values of a critic over, as in slime 0.2, where the two are connected."""
    words = extra.replace("SAVE", str(tmp_path / "save")).split()
    run = run_train([*flags, *words], tmp_path / "run", script=ASYNC_SCRIPT)
    assert len(run.values("train/loss")) == len(run.values("rollout/raw_reward")) == 2
    assert run.metric("train/train_rollout_logprob_abs_diff")[0] <= 1e-5
    assert len(run.values("train/critic-value_loss")) == (2 if "ppo" in extra else 0)
    assert list(run.metric("eval/held_out")) == [1]
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text().strip() == "1"


@pytest.mark.soak
@pytest.mark.parametrize("extra", ["", "--colocate"])
def test_of_slime_0_1(flags: list[str], tmp_path: Path, extra: str) -> None:
    words = f"{extra} --save {tmp_path / 'save'} --save-interval 1".split()
    run = run_train([*flags, *words], tmp_path / "run", script=FIRST_SCRIPT)
    assert len(run.values("train/loss")) == len(run.values("rollout/raw_reward")) == 2
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert sorted(run.metric("eval/held_out")) == [0, 1]
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text().strip() == "1"


@pytest.mark.soak
@pytest.mark.parametrize(
    "extra",
    [
        "",
        f"--save SAVE {ASYNC_SAVE}",
        f"--advantage-estimator ppo --colocate --save SAVE {ASYNC_SAVE}",
        "--release-train --save SAVE --update-weight-transport disk --update-weight-disk-dir SAVE/weights",
    ],
)
def test_other_ways_to_share_devices(flags: list[str], tmp_path: Path, extra: str) -> None:
    words = extra.replace("SAVE", str(tmp_path / "save")).split()
    run = run_train([*flags, *words], tmp_path / "run", script=SCRIPT)
    assert len(run.values("train/loss")) == len(run.values("rollout/raw_reward")) == 2
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert len(run.values("train/critic-value_loss")) == (2 if "ppo" in extra else 0)
    if words:
        assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text().strip() == "1"
