"""``train_async.py``: generation one step ahead, and an engine that dies during a rollout."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.run_train import Run, command_line, read_metric, rl_flags, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration


def engine_processes(run: Run) -> list[int]:
    return [
        pid
        for pid in run.processes()
        if "sglang.launch_server" in command_line(pid) and "process_supervisor" not in command_line(pid)
    ]


def test_one_step_ahead_until_an_engine_dies(tmp_path: Path):
    flags = rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl"))
    # Responses long enough that the engine is killed while it generates.
    extra = """--rollout-num-gpus 2 --num-rollout 1000 --rollout-max-response-len 256
        --custom-rm-path tests.support.rollout_hooks.parity_reward"""
    with Run([*flags, *extra.split()], tmp_path / "run", script="train_async.py") as run:
        run.wait_for(r"rollout 3 of 1000", 240)
        engines = engine_processes(run)
        assert len(engines) == 2
        killed_at = time.monotonic()
        os.kill(engines[1], signal.SIGKILL)
        ended = run.finish(60)
        assert time.monotonic() - killed_at < 30
        assert ended.returncode == 1
        run.assert_nothing_left(10)
    told = ended.output[ended.output.index("error: ") :]
    assert f"(pid {engines[1]}, " in told.splitlines()[0]
    assert "was ended by signal 9" in told.splitlines()[0]
    assert "/generate" in told  # the engine's last lines
    assert "ray/_private" not in ended.output

    # Rollout N + 1 is generated while rollout N is trained on: at the start with the weights of rollout N, from then on
    # always one version behind. No rollout mixes two versions.
    oldest, newest = (read_metric(ended.run_dir, f"rollout/weight_version/{which}") for which in ("min", "max"))
    assert [oldest[i] for i in range(4)] == [1, 1, 2, 3]
    assert [newest[i] for i in range(4)] == [1, 1, 2, 3]
    difference = read_metric(ended.run_dir, "train/train_rollout_logprob_abs_diff")
    assert difference[0] <= 1e-5
    assert difference[2] > 1e-5  # the trainer is a step ahead of what the engines generated with
