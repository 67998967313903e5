"""Kill the driver at any moment: nothing of the run is left 30 s later, and no prompt is lost or trained twice."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.loop_kills import LoopKills
from tests.support.run_train import Run, rl_flags, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]
# By a signal that comes before the run handles it, Python itself ends the process.
CODES = {signal.SIGKILL: (-9,), signal.SIGINT: (130, -2, 1), signal.SIGTERM: (143, -15)}
COUNT = int(os.environ.get("SLIME_SOAK_KILLS", "20"))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.timeout(COUNT * 120)
def test_signals_at_random_moments(tmp_path: Path, signum: signal.Signals):
    flags = rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl"))
    words = f"--num-rollout 100000 --rollout-num-gpus 2 --save {tmp_path}/save --load {tmp_path}/save --save-interval 1"
    flags += words.split()  # with --load: a start that was killed after its first checkpoint is continued
    rng = random.Random(int(signum))
    slowest = 0.0
    for number in range(COUNT):
        moment = rng.uniform(1.0, 25.0)
        with Run(flags, tmp_path / f"run{number}") as run:
            time.sleep(moment)
            run.send(signum)
            killed_at = time.monotonic()
            code = run.process.wait(45)
            run.assert_nothing_left()
            slowest = max(slowest, time.monotonic() - killed_at)
            assert code in CODES[signum], run.output
            assert "SystemError" not in run.output
    print(f"{signum.name} at {COUNT} random moments: slowest end {slowest:.1f} s")


@pytest.mark.parametrize(
    ("script", "extra", "images"),
    [
        ("train.py", [], False),
        ("train_async.py", [], False),
        ("train.py", ["--partial-rollout", "--over-sampling-batch-size", "6"], False),
        ("train.py", ["--lora-rank", "8", "--lora-sync", "adapter"], False),
        ("train.py", [], True),
        ("train.py", ["--partial-rollout", "--over-sampling-batch-size", "6"], True),
    ],
    ids=["sync", "async", "partial", "adapters", "images", "images partial"],
)
@pytest.mark.timeout(1800)
def test_every_prompt_is_trained_on_once_whatever_is_killed_when(
    tmp_path: Path, script: str, extra: list[str], images: bool
):
    """Two epochs in six rollouts; killed in a rollout, in training and in a checkpoint, in any order."""
    rng = random.Random(len(script) + len(extra) + images)
    run = LoopKills(tmp_path, 6, script=script, extra=extra, images=images)
    for stage in rng.sample(["rollout", "training", "save"], 3):
        print(run.kill_in(stage, rng))
    run.finish()
    run.check()


@pytest.mark.parametrize("family", ["gemma4", "deepseek_v3", "mixtral", "qwen3_next"])
@pytest.mark.timeout(1800)
def test_every_prompt_is_trained_on_once_with_models_of_other_layers(tmp_path: Path, family: str):
    """An epoch in three rollouts; killed in training and in a checkpoint."""
    rng = random.Random(family)
    run = LoopKills(tmp_path, 3, family=family)
    for stage in ("training", "save"):
        print(run.kill_in(stage, rng))
    run.finish()
    run.check()
