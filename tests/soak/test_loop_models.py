"""``train.py --colocate`` with a frozen judge: its engine is killed, then the actor's, and the run continues."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.integration.test_loop_engine_faults import engine_servers, wait_for_metric, wait_for_rollout
from tests.integration.test_loop_models import actor_and_judge
from tests.support.run_train import Run, command_line, read_metric, rl_flags, sums_file

pytestmark = [pytest.mark.integration, pytest.mark.soak]


@pytest.mark.timeout(1200)
def test_engines_of_both_models_are_killed(tmp_path: Path):
    actor, judge, engines = actor_and_judge(tmp_path)
    flags = rl_flags(actor, sums_file(tmp_path / "sums.jsonl"))
    extra = f"""--colocate --actor-num-gpus-per-node 2 --rollout-num-gpus 2 --sglang-config {engines}
        --num-rollout 100000 --rollout-max-response-len 128 --use-fault-tolerance
        --custom-rm-path tests.support.rollout_hooks.judged_reward"""
    with Run([*flags, *extra.split()], tmp_path / "run") as run:
        wait_for_rollout(run, 1)
        for model, checkpoint in (("judge", judge), ("actor", actor), ("judge", judge)):
            before = max(read_metric(run.run_dir, f"rollout/engines/{model}/restarted").values())
            (server,) = [pid for pid in engine_servers(run) if str(checkpoint) in command_line(pid)]
            os.kill(server, signal.SIGKILL)
            back = wait_for_metric(run, f"rollout/engines/{model}/restarted", before + 1)
            wait_for_rollout(run, back + 2)
        verdicts = [json.loads(line) for line in (run.run_dir / "judge.jsonl").read_text().splitlines()]
        assert len({(verdict["token"], round(verdict["log_prob"], 4)) for verdict in verdicts}) == 1
        difference = read_metric(run.run_dir, "train/train_rollout_logprob_abs_diff")
        assert len(difference) > 5
        assert max(difference.values()) <= 1e-5
