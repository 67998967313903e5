"""Kill the driver at any moment, from the first second on: nothing of the run is left 30 s later."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.run_train import Run, rl_flags, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]
COUNT = int(os.environ.get("SLIME_SOAK_KILLS", "20"))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.timeout(COUNT * 120)
def test_signals_at_random_moments(tmp_path: Path, signum: signal.Signals):
    flags = rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl"))
    flags += [
        "--num-rollout",
        "100000",
        "--rollout-num-gpus",
        "2",
        "--save",
        str(tmp_path / "save"),
        "--save-interval",
        "1",
    ]
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
            assert code != 0
    print(f"{signum.name} at {COUNT} random moments: slowest end {slowest:.1f} s")
