"""The quickstart's claims in full: three seeds, the control with shuffled rewards, the time it takes."""

from __future__ import annotations

import os
import time

import pytest

from examples.quickstart import recipe
from tests.support.quickstart import check_run, metric, run_quickstart

ROLLOUTS = recipe.GRPO_ROLLOUTS
PPO_ROLLOUTS = 60
BUDGET_S = 20 * 60
"""Time of a whole quickstart, its installation included, on an idle machine with two cores."""


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_adds_thirty_points(tmp_path, seed, capsys):
    begin = time.monotonic()
    result = run_quickstart(tmp_path, "--seed", str(seed), timeout_s=2300)
    seconds = time.monotonic() - begin
    with capsys.disabled():
        print(
            f"\nseed {seed}: {result['before']:.1%} -> {result['after']:.1%} in {seconds:.0f} s {result['seconds']}, "
            f"{os.cpu_count()} cores; seconds per stage of the median step: {median_stages(result['run_dir'])}"
        )
    check_run(result, ROLLOUTS)
    assert 0.20 <= result["before"] <= 0.60
    assert result["after"] >= result["before"] + 0.30
    assert seconds <= BUDGET_S


@pytest.mark.timeout(2400)
def test_shuffled_rewards_teach_nothing(tmp_path, capsys):
    result = run_quickstart(tmp_path, "--shuffled-rewards", timeout_s=2300)
    with capsys.disabled():
        print(f"\nshuffled rewards: {result['before']:.1%} -> {result['after']:.1%}")
    check_run(result, ROLLOUTS)
    assert abs(result["after"] - result["before"]) <= 0.05


@pytest.mark.timeout(3000)
def test_ppo_adds_fifteen_points(tmp_path, capsys):
    result = run_quickstart(tmp_path, "--algorithm", "ppo", "--rollouts", str(PPO_ROLLOUTS), timeout_s=2900)
    losses = metric(result["run_dir"], "train/critic-value_loss")
    with capsys.disabled():
        print(
            f"\nPPO: {result['before']:.1%} -> {result['after']:.1%} {result['seconds']}, accuracy by rollout "
            f"{result['evaluations']}, value loss {losses[0]:.3f} -> {losses[max(losses)]:.3f}"
        )
    check_run(result, PPO_ROLLOUTS)
    assert result["after"] >= result["before"] + 0.15
    # Two steps per rollout; the actor is not trained on the first five.
    assert sorted(metric(result["run_dir"], "train/loss")) == list(range(10, 2 * PPO_ROLLOUTS))


@pytest.mark.timeout(2400)
def test_adapters_learn_as_much_and_pushes_are_small(tmp_path, capsys):
    result = run_quickstart(tmp_path, "--lora-rank", "8", timeout_s=2300)
    with capsys.disabled():
        print(f"\nLoRA: {result['before']:.1%} -> {result['after']:.1%}, {result['push_bytes']} bytes a push")
    check_run(result, ROLLOUTS)
    assert result["after"] >= result["before"] + 0.20
    assert result["push_bytes"] == 2 * 8 * 2816 * 4  # two layers, rank 8, fp32; 2816: inputs and outputs of all layers


def median_stages(run_dir):
    """Return {stage: median seconds} over the rollouts of a run."""
    stages = ("generate", "train", "sync_weights")
    series = {stage: sorted(metric(run_dir, f"perf/stage/{stage}_time").values()) for stage in stages}
    return {stage: round(values[len(values) // 2], 3) for stage, values in series.items() if values}
