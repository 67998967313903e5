"""A whole GRPO run over one prefill and two decode engines, one of each of which dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.test_loop_engine_faults import engine_servers, wait_for_metric, wait_for_rollout
from tests.support.run_train import Run, read_metric, rl_flags, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]
pytest.importorskip("nixl", reason="prefill and decode engines on a CPU need nixl")


@pytest.mark.timeout(900)
def test_grpo_over_prefill_and_decode_engines(tmp_path: Path):
    flags = rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl"))
    extra = """--prefill-num-servers 1 --rollout-num-gpus 3 --num-rollout 100000 --rollout-max-response-len 64
        --use-fault-tolerance --check-weight-update-equal --custom-rm-path tests.support.rollout_hooks.parity_reward"""
    with Run([*flags, *extra.split()], tmp_path / "run") as run:
        wait_for_rollout(run, 3)
        for lost, kind in enumerate(("decode", "prefill"), start=1):
            pid = next(pid for pid in engine_servers(run) if f"--disaggregation-mode={kind}" in command_of(pid))
            os.kill(pid, signal.SIGKILL)
            back = wait_for_metric(run, "rollout/engines/restarted", lost)
            wait_for_rollout(run, back + 2)
    assert max(read_metric(run.run_dir, "train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    oldest = read_metric(run.run_dir, "rollout/weight_version/min")
    assert all(version >= step + 1 for step, version in oldest.items())
    assert max(read_metric(run.run_dir, "rollout/engines/lost").values()) == 2


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
