"""Runs that are equal to the bit: replays under other layouts than on every change, and the whole loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.replay import differences, train_twice, write_dumps
from tests.support.run_train import rl_flags, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.soak
ROLLOUTS = 3
TERMS = "--deterministic-mode --use-kl-loss --kl-loss-coef 0.1 --entropy-coef 0.01 --use-rollout-entropy"
LAYOUTS = {
    "one rank": "--actor-num-gpus-per-node 1",
    "tensor parallel": "--actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel",
    "context parallel": "--actor-num-gpus-per-node 2 --context-parallel-size 2",
    "pipeline": "--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2",
    "data parallel, overlapped": "--actor-num-gpus-per-node 2 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather",
}


def flags_of_a_run(folder: Path) -> list[str]:
    flags = rl_flags(make_tiny_checkpoint(folder / "model"), sums_file(folder / "sums.jsonl"))
    return [*flags, *TERMS.split(), "--num-rollout", str(ROLLOUTS), "--global-batch-size", "8"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replays_are_equal_to_the_byte(layout: str, tmp_path: Path) -> None:
    dumps = write_dumps(tmp_path / "dumps", ROLLOUTS)
    words = f"--debug-train-only --load-debug-rollout-data {dumps} {LAYOUTS[layout]}"
    runs = train_twice([*flags_of_a_run(tmp_path), *words.split()], tmp_path, ROLLOUTS - 1)
    assert differences(runs) == {}


def test_the_whole_loop_with_greedy_decoding_is_equal_to_the_byte(tmp_path: Path) -> None:
    """One engine that serves one request at a time.

    The answers to a prompt are equal, so rewards are not compared within its group, but over the whole rollout.
    """
    words = """--rollout-top-k 1 --sglang-server-concurrency 1 --advantage-estimator reinforce_plus_plus
        --normalize-advantages --custom-rm-path tests.support.rollout_hooks.parity_reward"""
    runs = train_twice([*flags_of_a_run(tmp_path), *words.split()], tmp_path, ROLLOUTS - 1)
    assert differences(runs) == {}
    assert any(line.startswith("train/grad_norm ") and not line.endswith(" 0.0") for line in runs[0]["metrics"])
