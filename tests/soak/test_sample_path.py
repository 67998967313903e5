"""The recording of the files that one sample enters still finds its way from the prompt to the loss."""

from __future__ import annotations

from pathlib import Path

from tests.support.distributed import run_distributed


def test_a_sample_is_followed_from_the_prompt_to_the_loss(tmp_path: Path) -> None:
    [found] = run_distributed("tests.support.sample_path:record", 1, {"folder": str(tmp_path)})
    assert {"rollout/sglang_rollout.py", "rollout/data_source.py", "ray/manager/conversion.py"} < {
        *found["rollout and conversion"]
    }
    assert {"batching/packing.py", "backends/megatron_utils/train/loss.py"} < {*found["training"]}
