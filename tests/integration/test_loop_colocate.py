"""``train.py --colocate``: engine and trainer take turns on the same slots. Two slots, two ranks, two engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.run_train import rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration


@pytest.mark.soak
def test_colocated_loop(tmp_path: Path):
    flags = rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl"))
    # Tensor parallel, so that no rank holds whole weights.
    extra = f"""--colocate --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel
        --num-rollout 2 --check-weight-update-equal --save {tmp_path / "save"} --save-interval 1
        --custom-rm-path tests.support.rollout_hooks.parity_reward"""
    run = run_train([*flags, *extra.split()], tmp_path / "run")
    assert "slots: 127.0.0.1/0, 127.0.0.1/1\n" in run.output
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert run.metric("rollout/weight_version/max") == {0: 1.0, 1: 2.0}
    for stage in ("offload_rollout", "onload_train", "offload_train", "onload_rollout", "sync_weights"):
        assert sorted(run.metric(f"perf/stage/{stage}_time")) == [0, 1], stage
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text().strip() == "1"
