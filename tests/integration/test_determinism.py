"""Two trainings on the same rollouts, by ``train.py`` with ``--deterministic-mode``, are equal to the bit.

The trajectories of these rollouts have one to three samples, and do not fill whole steps.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.replay import differences, train_twice, trajectories, write_dumps
from tests.support.run_train import rl_flags, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration
ROLLOUTS, BATCH = 2, 6
EVERY_TERM = (
    "--deterministic-mode --debug-train-only --use-kl-loss --kl-loss-coef 0.1 --entropy-coef 0.01 --use-tis "
    f"--use-rollout-entropy --global-batch-size {BATCH} --balance-data --use-distributed-optimizer"
)


@pytest.mark.soak
def test_parameters_and_metrics_are_equal_to_the_byte(tmp_path: Path) -> None:
    dumps = write_dumps(tmp_path / "dumps", ROLLOUTS)
    flags = [
        *rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl")),
        *EVERY_TERM.split(),
        *["--num-rollout", str(ROLLOUTS), "--actor-num-gpus-per-node", "2", "--load-debug-rollout-data", dumps],
    ]
    runs = train_twice(flags, tmp_path, ROLLOUTS - 1)
    assert differences(runs) == {}
    steps = [line for line in runs[0]["metrics"] if line.startswith("train/grad_norm ")]
    assert len(steps) == 5  # 16 trajectories are two steps of 6; with the 4 left over the next 16 are three
    assert any(line.startswith("rollout/entropy 1 ") for line in runs[0]["metrics"])
    assert any(line.startswith("model-00001-of-00001.safetensors ") for line in runs[0]["files"])

    trained: dict[int, list[int]] = {}
    for line in map(json.loads, runs[0]["trained"]):
        trained.setdefault(line["rollout"], []).extend(line["samples"])
    order = trajectories(dumps, ROLLOUTS)
    assert sorted(trained[0]) == sorted(index for trajectory in order[: 2 * BATCH] for index in trajectory)
    assert sorted(trained[1]) == sorted(index for trajectory in order[2 * BATCH : 5 * BATCH] for index in trajectory)
