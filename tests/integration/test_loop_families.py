"""``train.py`` without a GPU, with families whose attention SGLang computes with kernels for GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.model_families import make_checkpoint
from tests.support.run_train import rl_flags, run_train, sums_file
from tools.tiny_model import make_tokenizer

pytestmark = pytest.mark.integration
MORE = (
    *("deepseek_v3", "kimi_k2", "glm4_moe_lite", "minimax_m2", "qwen3_next", "qwen3_5", "qwen3_5_moe"),
    *("gemma3", "gemma4", "gpt_oss", "deepseek_v32", "glm5", "glm5.2"),
)
"""Qwen3.5 does so on every change in test_loop_vision.py, with prompts of text alone among those with images."""


@pytest.mark.parametrize("family", ["moonlight", *(pytest.param(x, marks=pytest.mark.soak) for x in MORE)])
def test_trainer_and_engine_agree(family: str, tmp_path: Path) -> None:
    """The second rollout is made with weights that the trainer has pushed."""
    checkpoint = Path(make_checkpoint(tmp_path, family, vocab_size=384))
    make_tokenizer(checkpoint)
    flags = rl_flags(checkpoint, sums_file(tmp_path / "sums.jsonl"))
    more = ["--num-rollout", "2", "--custom-rm-path", "tests.support.rollout_hooks.every_other"]
    run = run_train([*flags, *more], tmp_path / "run")
    differences = run.metric("train/train_rollout_logprob_abs_diff")
    assert len(differences) == 2
    assert max(differences.values()) <= 1e-5
    assert min(run.metric("train/grad_norm").values()) > 0
