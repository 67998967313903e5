"""Two trainings on the same rollouts, by ``train.py`` with ``--deterministic-mode``, are equal to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.replay import train_twice, write_dumps
from tests.support.run_train import rl_flags, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration
ROLLOUTS = 2
EVERY_TERM = (
    "--deterministic-mode --debug-train-only --use-kl-loss --kl-loss-coef 0.1 --entropy-coef 0.01 --use-tis "
    "--use-rollout-entropy --global-batch-size 8 --balance-data --use-distributed-optimizer"
)


def test_parameters_and_metrics_are_equal_to_the_byte(tmp_path: Path) -> None:
    flags = [
        *rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl")),
        *EVERY_TERM.split(),
        *["--num-rollout", str(ROLLOUTS), "--actor-num-gpus-per-node", "2"],
        *["--load-debug-rollout-data", write_dumps(tmp_path / "dumps", ROLLOUTS)],
    ]
    first, second = train_twice(flags, tmp_path, ROLLOUTS - 1)
    assert first == second
    assert any(line.startswith("train/grad_norm 3 ") for line in first["metrics"])  # two steps in each rollout
    assert any(line.startswith("rollout/entropy 1 ") for line in first["metrics"])
    assert any(line.startswith("model-00001-of-00001.safetensors ") for line in first["files"])
