"""The whole loop with an engine that stops, and with a rollout that always generates and loses every engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from slime.utils.process_supervisor import descendants
from tests.integration.test_loop_engine_faults import engine_servers, wait_for_metric, wait_for_rollout
from tests.support.run_train import Run, read_metric, rl_flags, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]

FLAGS = """--num-rollout 100000 --rollout-max-response-len 256 --use-fault-tolerance --rollout-num-gpus 2
    --custom-rm-path tests.support.rollout_hooks.parity_reward"""


def flags_of(root: Path) -> list[str]:
    return [*rl_flags(make_tiny_checkpoint(root / "model"), sums_file(root / "sums.jsonl")), *FLAGS.split()]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("who", ["all of it", "its scheduler"])
def test_an_engine_that_stops_is_replaced(tmp_path: Path, who: str):
    """SIGSTOP of a whole engine, or of the scheduler behind a server that still takes connections."""
    checks = "--rollout-health-check-interval 1 --rollout-health-check-timeout 10 --rollout-health-check-failures 2"
    with Run([*flags_of(tmp_path), *checks.split()], tmp_path / "run") as run:
        wait_for_rollout(run, 2)
        first = engine_servers(run)
        family = [first[1], *descendants(first[1])]
        if who != "all of it":
            family = [pid for pid in family if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            assert len(family) == 1
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        run.wait_for(r"health checks in a row failed|does not respond any more", 120)
        back = wait_for_metric(run, "rollout/engines/restarted", 1)
        wait_for_rollout(run, back + 2)
        assert not any(Path(f"/proc/{pid}").exists() for pid in family)
        assert first[0] in engine_servers(run)
        assert read_metric(run.run_dir, "rollout/engines/lost")[back + 1] == 1
        assert max(read_metric(run.run_dir, "train/train_rollout_logprob_abs_diff").values()) <= 1e-5


@pytest.mark.timeout(600)
def test_generation_that_never_stops_survives_the_loss_of_every_engine(tmp_path: Path):
    path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    flags = [*flags_of(tmp_path), "--rollout-function-path", path]
    with Run(flags, tmp_path / "run", script="train_async.py") as run:
        wait_for_rollout(run, 2)
        for pid in engine_servers(run):
            os.kill(pid, signal.SIGKILL)
        back = wait_for_metric(run, "rollout/engines/restarted", 2)
        wait_for_rollout(run, back + 3)
        assert read_metric(run.run_dir, "rollout/engines/serving")[back + 2] == 2
