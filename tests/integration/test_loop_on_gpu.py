"""``train.py --colocate`` on one GPU: engine and trainer take turns, weights are pushed by handles of memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.gpu import checkpoint_600m, engine_flags
from tests.support.run_train import Finished, canary, rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.gpu

SHOWN = ("perf/", "train/train_rollout_logprob_abs_diff", "train/grad_norm")


def figures(run: Finished) -> None:
    """Print every metric of time, speed and memory, rollout by rollout."""
    values: dict[str, list[float]] = {}
    for record in map(json.loads, (run.run_dir / "metrics.jsonl").read_text().splitlines()):
        if record["name"].startswith(SHOWN):
            values.setdefault(record["name"], []).append(round(record["value"], 4))
    for name, found in sorted(values.items()):
        print(name, found)


def test_a_tiny_model_in_fp32_is_exact(tmp_path: Path) -> None:
    """Engine and trainer compute the same log-probs when both do so in fp32."""
    model = make_tiny_checkpoint(tmp_path / "model", head_dim=64)
    flags = [*rl_flags(model, sums_file(tmp_path / "sums.jsonl")), *engine_flags()]
    extra = "--colocate --fp32 --sglang-dtype float32 --num-rollout 3 --check-weight-update-equal"
    run = run_train([*flags, *extra.split()], tmp_path / "run", device="cuda")
    figures(run)
    assert canary(run.output) < 1e-4
    assert max(run.values("train/train_rollout_logprob_abs_diff")) < 1e-4
    assert run.metric("rollout/weight_version/max") == {0: 1.0, 1: 2.0, 2: 3.0}


def test_a_model_of_600_million_parameters(tmp_path: Path) -> None:
    """The shape of Qwen3-0.6B in bf16: four rollouts of 256 samples of 512 tokens."""
    model = checkpoint_600m(tmp_path / "model")
    flags = [*rl_flags(model, sums_file(tmp_path / "sums.jsonl")), *engine_flags()]
    extra = """--colocate --num-rollout 4 --check-weight-update-equal --rollout-batch-size 32 --n-samples-per-prompt 8
        --global-batch-size 256 --rollout-max-response-len 512 --max-tokens-per-gpu 16384 --lr 1e-6
        --log-probs-chunk-size 4096 --sglang-max-running-requests 256"""
    run = run_train([*flags, *extra.split()], tmp_path / "run", device="cuda", timeout_s=280)
    print(run.output[-6000:])
    figures(run)
    assert canary(run.output) < 0.05
    assert max(run.values("train/train_rollout_logprob_abs_diff")) < 0.05
    assert run.metric("rollout/weight_version/max") == {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}
