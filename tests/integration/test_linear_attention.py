"""Gated delta nets under tensor and context parallelism: what ranks exchange, and checkpoints for other layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.distributed import run_distributed
from tests.support.model_families import LAYOUTS, make_checkpoint

pytestmark = pytest.mark.integration
SPEC = ["slime_plugins.models.qwen3_5", "get_qwen3_5_spec"]


def test_ranks_have_some_heads_of_whole_sequences_or_all() -> None:
    """All when the heads cannot be divided; a gradient returns to the rank of its token alone."""
    lengths, heads = [8, 0, 4, 12], [2, 3]
    by_rank = run_distributed("tests.support.linear_attention_ranks:exchange", 2, {"lengths": lengths, "heads": heads})
    for rank, found in enumerate(by_rank):
        for count, case in zip(heads, found, strict=True):
            own = [rank] if count == 2 else [0, 1, 2]
            assert case["own"] == own
            assert case["sequences"] == [[token + 1000 * head for head in own] for token in range(sum(lengths))]
            assert case["same"]
            assert case["gradient"] == [rank + 1]


def test_it_is_the_module_of_transformers_which_attention_of_your_own_may_be(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen3_5")
    arguments = {"checkpoint": checkpoint}
    for ours, theirs in run_distributed("tests.support.linear_attention_ranks:both_modules", 2, arguments):
        torch.testing.assert_close(ours["pack"]["logits"], theirs["pack"]["logits"], atol=2e-5, rtol=0)
        assert ours["gradients"].keys() == theirs["gradients"].keys()
        for name, gradient in ours["gradients"].items():
            expected = theirs["gradients"][name]
            assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max(), name


def test_adapters_are_on_the_other_layers(tmp_path: Path) -> None:
    arguments = {
        "checkpoints": {"qwen3_5": make_checkpoint(tmp_path, "qwen3_5")},
        "layouts": {"tp2": LAYOUTS["tp2"]},
        "scratch": str(tmp_path),
    }
    for rank in run_distributed("tests.support.lora_ranks:all_families", 2, arguments):
        found = rank["tp2/qwen3_5"]
        assert found["logits"] < 5e-5
        assert found["gradients"] < 1e-5
        adapted = {entry.removesuffix(".weight").rsplit(".", 2)[-2] for entry in found["names"]}
        assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.soak
@pytest.mark.parametrize("layouts", [({"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}, {})])
def test_a_run_is_resumed_under_another_layout(layouts: tuple[dict[str, int], ...], tmp_path: Path) -> None:
    """Weights and optimizer states; the steps after it are those of the run that was not interrupted."""
    checkpoint = make_checkpoint(tmp_path, "qwen3_5", vocab_size=384)
    arguments = {"checkpoint": checkpoint, "save": str(tmp_path / "save"), "layouts": [*layouts], "spec": SPEC}
    resumed = run_distributed(
        "tests.support.trainer_ranks:resume_scenario", 2, {**arguments, "adam_eps": 1e-3}, timeout=300
    )
    uninterrupted, again, *others = resumed[-1]
    assert again["loaded_equal"]
    assert again["steps"] == uninterrupted["steps"]
    for here in others:
        for expected, steps in zip(uninterrupted["steps"], here["steps"], strict=True):
            for name, value in expected[0].items():
                assert steps[0][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
