"""The small versions of the examples, from nothing: what is learned, and that it is the reward's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.utils.misc import load_function
from tests.support.example_results import check_exchanged, check_result

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [
    "adaptive_environments", "coding_agent_rl", "delta_weight_sync", "eval_multi_task", "multi_agent", "retool",
    "search_r1", "tournament", "tau_bench", "agentflow", "memagent", "openai_agents", "tool_orchestra",
    "strands_sglang", "geo3k_vlm", "geo3k_vlm_multi_turn",
]  # fmt: skip


def run(name: str, directory: Path, *flags: str) -> dict[str, Any]:
    """Run a small version; return its result."""
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}.run", "--dir", str(directory), *flags], cwd=ROOT, capture_output=True,
        text=True, timeout=3400, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = directory / ("grpo_shuffled" if "--shuffled-rewards" in flags else "grpo")
    result: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return {**result, "run_dir": run_dir}


def metric(run_dir: Path, name: str) -> list[float]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [float(row["value"]) for row in rows if row["name"] == name]


@pytest.mark.timeout(7000)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_reward_teaches_and_shuffled_rewards_do_not(name, tmp_path, capsys):
    if name == "strands_sglang":
        pytest.importorskip("strands_sglang")
    learned = run(name, tmp_path)
    control = run(name, tmp_path, "--shuffled-rewards")
    with capsys.disabled():
        for one in (learned, control):
            print(f"\n{name}: shuffled={one['shuffled']} {one['before']} -> {one['after']} in {one['seconds']}")
    for data_set in load_function(f"examples.{name}.run.EXAMPLE").data_sets:
        check_result(learned, control, data_set)
    if "exchanged" in learned["after"]:
        check_exchanged(learned)
    if name == "adaptive_environments":
        for environment in learned["before"]:
            levels = metric(learned["run_dir"], f"rollout/environment/{environment}/difficulty")
            assert levels[0] == 0.0
            assert levels[-1] > 0.0
    # what the engines generated is what is trained on; agents that write to a buffer run ahead of the weights
    if name != "openai_agents":
        assert max(metric(learned["run_dir"], "train/train_rollout_logprob_abs_diff")) <= 1e-4
