"""``--release-train`` and weights through files under kills, with and without engines that overlap with training."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.loop_kills import LoopKills
from tests.support.run_train import rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]


def disk_flags(folder: Path) -> list[str]:
    return ["--update-weight-transport", "disk", "--update-weight-disk-dir", str(folder / "shared")]


@pytest.mark.parametrize("script", ["train.py", "train_async.py"])
@pytest.mark.timeout(1800)
def test_released_trainers_lose_nothing_whatever_is_killed_when(tmp_path: Path, script: str):
    rng = random.Random(len(script))
    run = LoopKills(tmp_path, 6, script=script, extra=["--release-train", *disk_flags(tmp_path)])
    for stage in rng.sample(["rollout", "training", "save"], 3):
        print(run.kill_in(stage, rng))
    run.finish()
    run.check()
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.parametrize(
    ("script", "extra"),
    [
        ("train.py", ["--colocate"]),
        ("train_async.py", []),
        (
            "train_async.py",
            [
                "--rollout-function-path",
                "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
                "--max-staleness",
                "1",
            ],  # else all rollouts may be made before the first push
        ),
    ],
    ids=["colocate", "async", "fully-async"],
)
@pytest.mark.timeout(900)
def test_every_loop_takes_weights_through_files(tmp_path: Path, script: str, extra: list[str]):
    flags = rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl"))
    flags += ["--num-rollout", "3", "--check-weight-update-equal", *disk_flags(tmp_path), *extra]
    flags += ["--custom-rm-path", "tests.support.rollout_hooks.parity_reward"]
    run = run_train(flags, tmp_path / "run", script=script)
    assert max(run.metric("rollout/weight_version/max").values()) >= 2
    if script == "train.py":
        assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert list((tmp_path / "shared").iterdir()) == []
