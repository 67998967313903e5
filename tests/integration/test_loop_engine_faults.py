"""``train.py`` whose engines and router are killed: engines are restarted with the trainer's weights, also after all of
them at once, and the router on its port."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.run_train import Run, command_line, read_metric, rl_flags, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]

RESTART_DEADLINE_S = 240.0


def engine_servers(run: Run) -> list[int]:
    """The HTTP servers of the run's engines."""
    return [
        pid
        for pid in run.processes()
        if "sglang.launch_server" in command_line(pid) and "process_supervisor" not in command_line(pid)
    ]


def wait_for_metric(run: Run, name: str, at_least: float) -> int:
    """Return the rollout after which the metric was so high."""
    end = time.monotonic() + RESTART_DEADLINE_S
    while time.monotonic() < end:
        reached = [step for step, value in sorted(read_metric(run.run_dir, name).items()) if value >= at_least]
        if reached:
            return reached[0]
        assert run.process.poll() is None, f"the run has ended:\n{run.output}{run.logs()}"
        time.sleep(0.2)
    raise AssertionError(f"{name} did not reach {at_least}:\n{run.output}{run.logs()}")


def wait_for_rollout(run: Run, rollout_id: int) -> None:
    run.wait_for(rf"rollout {rollout_id} of ", RESTART_DEADLINE_S)


@pytest.mark.parametrize("where", ["beside", "colocated"])
def test_engines_that_are_killed_are_restarted(tmp_path: Path, where: str):
    flags = rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl"))
    # Responses long enough that engines are killed while they generate.
    extra = f"""--num-rollout 100000 --rollout-max-response-len 256 --use-fault-tolerance
        --custom-rm-path tests.support.rollout_hooks.parity_reward
        {"--colocate --actor-num-gpus-per-node 2 --num-gpus-per-node 2" if where == "colocated" else ""}
        --rollout-num-gpus 2"""
    with Run([*flags, *extra.split()], tmp_path / "run") as run:
        wait_for_rollout(run, 1)
        first = engine_servers(run)
        assert len(first) == 2
        if where == "colocated":  # beside the trainer tests/integration/test_engine_kills.py does it
            os.kill(first[1], signal.SIGKILL)
            run.wait_for(rf"\(pid {first[1]}, .* was ended by signal 9", 60)
            back = wait_for_metric(run, "rollout/engines/restarted", 1)
            wait_for_rollout(run, back + 1)
            assert first[0] in engine_servers(run)

        manager_log = (run.run_dir / "logs" / "rollout_manager.log").read_text()
        os.kill(int(re.findall(r"router: \w+, pid (\d+), http", manager_log)[-1]), signal.SIGKILL)
        after = wait_for_metric(run, "rollout/engines/router_restarts", 1)
        wait_for_rollout(run, after + 1)

        second = engine_servers(run)
        assert len(second) == 2
        for pid in second:
            os.kill(pid, signal.SIGKILL)
        back = wait_for_metric(run, "rollout/engines/restarted", 3 if where == "colocated" else 2)
        wait_for_rollout(run, back + 2)
        assert not set(first) & set(engine_servers(run))

        serving = read_metric(run.run_dir, "rollout/engines/serving")
        assert serving[back + 1] == 2
        # Nothing was generated with the weights of the checkpoint: trainer and engines agree throughout.
        difference = read_metric(run.run_dir, "train/train_rollout_logprob_abs_diff")
        assert len(difference) > 3
        assert max(difference.values()) <= 1e-5
