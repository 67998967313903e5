"""An engine that rounds otherwise than the trainer: following its experts brings the log-probs closer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.run_train import Finished, rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.soak


def test_the_engines_experts_halve_the_mismatch(tmp_path: Path) -> None:
    checkpoint = make_tiny_checkpoint(
        tmp_path / "model", "qwen3_moe", tie_word_embeddings=False, num_hidden_layers=4, num_experts=16,
        num_experts_per_tok=2, initializer_range=0.2,
    )  # fmt: skip
    dumps = str(tmp_path / "dumps" / "{rollout_id}.pt")
    flags = """--num-rollout 1 --rollout-max-response-len 64 --sglang-dtype bfloat16
        --custom-rm-path tests.support.rollout_hooks.parity_reward"""
    common = [*rl_flags(checkpoint, sums_file(tmp_path / "sums.jsonl")), *flags.split()]
    replay = ["--use-rollout-routing-replay", "--save-debug-rollout-data", dumps]
    followed = run_train([*common, *replay], tmp_path / "followed")
    alone = run_train([*common, "--load-debug-rollout-data", dumps], tmp_path / "alone")  # the same tokens

    def mismatch(run: Finished) -> float:
        return run.metric("train/mismatch/mean")[0]

    differing = followed.metric("train/routing_replay_differing")[0]
    print(f"{differing:.2%} of the choices differ: {mismatch(followed):.4f} if followed, {mismatch(alone):.4f} if not")
    assert 0 < differing < 0.2
    assert mismatch(followed) < 0.5 * mismatch(alone)
