"""``train_async.py``: generation one step ahead, with engines that die during rollouts.

On every change: such a run in ``test_loop_disaggregated.py``, engines that die in ``test_engine_kills.py``.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.run_train import Run, command_line, read_metric, rl_flags, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]


def engine_processes(run: Run) -> list[int]:
    return [
        pid
        for pid in run.processes()
        if "sglang.launch_server" in command_line(pid) and "process_supervisor" not in command_line(pid)
    ]


def test_one_step_ahead_until_no_engine_is_left(tmp_path: Path):
    flags = rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl"))
    # Responses long enough that engines are killed while they generate.
    extra = """--rollout-num-gpus 2 --num-rollout 100000 --rollout-max-response-len 256
        --custom-rm-path tests.support.rollout_hooks.parity_reward"""
    with Run([*flags, *extra.split()], tmp_path / "run", script="train_async.py") as run:
        run.wait_for(r"rollout 3 of 100000", 240)
        engines = engine_processes(run)
        assert len(engines) == 2
        os.kill(engines[1], signal.SIGKILL)
        # The other one continues, and gets the weights of the following steps alone.
        run.wait_for(rf"\(pid {engines[1]}, .* was ended by signal 9", 60)
        run.wait_for(r"1 of 2 engines continue", 60)
        alone = max(read_metric(run.run_dir, "train/loss")) + 4
        run.wait_for(rf"rollout {alone} of 100000", 240)
        killed_at = time.monotonic()
        os.kill(engines[0], signal.SIGKILL)
        ended = run.finish(60)
        assert time.monotonic() - killed_at < 30
        assert ended.returncode == 1
        run.assert_nothing_left(10)
    reported = ended.output[ended.output.index("error: ") :]
    assert f"(pid {engines[0]}, " in reported.splitlines()[0]
    assert "was ended by signal 9" in reported.splitlines()[0]
    assert "/generate" in reported  # the engine's last lines
    assert "No engine is left" in reported
    assert "ray/_private" not in ended.output
    assert set(read_metric(ended.run_dir, "rollout/engines/lost").values()) == {1}

    # Rollout N + 1 is generated while rollout N is trained on: at the start with the weights of rollout N, from then on
    # always one version behind. No rollout mixes two versions.
    oldest, newest = (read_metric(ended.run_dir, f"rollout/weight_version/{which}") for which in ("min", "max"))
    assert [oldest[i] for i in range(alone)] == [max(1, i) for i in range(alone)]
    assert newest == oldest
    difference = read_metric(ended.run_dir, "train/train_rollout_logprob_abs_diff")
    assert difference[0] <= 1e-5
    assert difference[2] > 1e-5  # the trainer is a step ahead of what the engines generated with
