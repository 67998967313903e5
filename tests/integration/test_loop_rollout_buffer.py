"""``train.py`` on trajectories of the rollout buffer: conversations become training steps, also after a restart.

On every change: rollouts of a real buffer and a restart, in ``tests/unit/slime_plugins/test_rollout_buffer.py``.
"""

from __future__ import annotations

import pytest

from slime.rollout.debug_data import load_rollout
from tests.support.rollout_buffers import ServedBuffer
from tests.support.run_train import rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_run_trains_on_conversations(tmp_path, restarted):
    flags = rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl", 12))
    dumps = tmp_path / "dumps"
    with ServedBuffer() as served:
        command = [
            *flags, "--rollout-function-path", "slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout",
            "--rollout-buffer-url", served.url, "--save", tmp_path / "save", "--load", tmp_path / "save",
            "--save-interval", 1, "--save-debug-rollout-data", dumps / "{rollout_id}.pt", "--num-rollout",
        ]  # fmt: skip
        ends = [2, 3] if restarted else [3]
        runs = [
            run_train([*map(str, command), str(end), "--override-opt_param-scheduler"], tmp_path / f"run-{end}")
            for end in ends
        ]
    assert [sorted(run.metric("train/loss")) for run in runs] == ([[0, 1], [2]] if restarted else [[0, 1, 2]])
    for run in runs:
        assert set(run.metric("rollout/buffer/failed_samples").values()) == {0.0}
        assert all(norm >= 0 for norm in run.metric("train/grad_norm").values())
    samples = [sample for number in range(3) for sample in load_rollout(dumps / f"{number}.pt")]
    assert len(samples) == 3 * 16
    counts: dict[str, int] = {}
    for sample in samples:
        counts[sample.metadata["instance_id"]] = counts.get(sample.metadata["instance_id"], 0) + 1
        assert sample.metadata["round_number"] == 1
        assert sample.reward in (0, 1)
    assert counts == {str(number): 4 for number in range(12)}
