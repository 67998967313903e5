"""Images of a micro-batch as the model gets them, and the FLOPs of the vision tower that are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.train.data import model_inputs, tower_flops
from slime.models.tower import tower_of
from tests.support.arguments import run_args

A, B = torch.rand(8, 3), torch.rand(16, 3)


def sample(*images: tuple[torch.Tensor, list[int]]) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.cat([pixels for pixels, _ in images]),
        "image_grid_thw": torch.tensor([shape for _, shape in images]),
    }


PROMPT = sample((A, [1, 2, 4]))
SAMPLES: list[dict[str, torch.Tensor] | None] = [
    PROMPT, None, PROMPT, sample((A, [1, 2, 4]), (B, [1, 4, 4]), (A, [1, 2, 4])), sample((A, [1, 4, 2])),
]  # fmt: skip
"""The third shares the tensors of the first; the fourth has a copy and, after another image, the same again."""
GRIDS = [[1, 2, 4], [1, 2, 4], [1, 2, 4], [1, 4, 4], [1, 2, 4], [1, 4, 2]]


def batch(samples: list[Any]) -> dict[str, Any]:
    return {"tokens": torch.zeros(1, 4), "packed_seq_params": None, "multimodal_train_inputs": samples}


def test_equal_images_are_given_once() -> None:
    inputs = model_inputs(batch(SAMPLES), distinct=True)
    assert torch.equal(inputs["pixel_values"], torch.cat([A, B, A]))
    assert inputs["image_uses"].tolist() == [0, 0, 0, 1, 0, 2]
    assert inputs["image_grid_thw"].tolist() == GRIDS


def test_other_models_get_the_pixels_of_every_image() -> None:
    inputs = model_inputs(batch(SAMPLES))
    assert torch.equal(inputs["pixel_values"], torch.cat([A, A, A, B, A, A]))
    assert "image_uses" not in inputs


def test_later_stages_get_grids_alone() -> None:
    inputs = model_inputs(batch(SAMPLES), pixels=False)
    assert inputs["image_grid_thw"].tolist() == GRIDS
    assert inputs.keys().isdisjoint({"pixel_values", "image_uses"})


@pytest.mark.parametrize("samples", [[None, None], []])
def test_without_images(samples: list[Any]) -> None:
    assert model_inputs(batch(samples), distinct=True).keys().isdisjoint({"pixel_values", "image_uses"})


def test_flops_of_a_tower_are_those_of_distinct_images_of_each_micro_batch(tmp_path: Path) -> None:
    vision = {
        "depth": 2, "hidden_size": 8, "intermediate_size": 12, "num_heads": 2, "out_hidden_size": 8, "patch_size": 4,
        "num_position_embeddings": 16,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": vision}))
    tower = tower_of({"vision_config": vision})
    assert tower is not None
    args = run_args(
        spec=["slime_plugins.models.qwen3_vl", "get_qwen3_vl_model_provider"], hf_checkpoint=str(tmp_path),
        num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=128,
    )  # fmt: skip
    data = {"multimodal_train_inputs": SAMPLES, "micro_batch_indices": [[0, 1, 2], [4, 3]]}
    computed = [(1, 2, 4), (1, 4, 2), (1, 2, 4), (1, 4, 4)]
    assert tower_flops(args, data) == pytest.approx(tower.forward_flops(computed))
    assert tower_flops(args, {**data, "multimodal_train_inputs": [None] * 5}) == 0
    assert tower_flops(run_args(**{**vars(args), "spec": None}), data) == 0
