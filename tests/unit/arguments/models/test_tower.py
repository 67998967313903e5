"""The vision tower's parameters, FLOPs and kept activations, against transformers, torch's counter and autograd."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slime.models.tower import Tower, tower_of

QWEN3_VL = {
    "depth": 27, "deepstack_visual_indexes": [8, 16, 24], "hidden_size": 1152, "in_channels": 3,
    "intermediate_size": 4304, "num_heads": 16, "num_position_embeddings": 2304, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
QWEN2_5_VL = {
    "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
    "patch_size": 14, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    "temporal_patch_size": 2,
}  # fmt: skip
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-VL-4B": (
        "qwen3_vl",
        {
            **QWEN3_VL, "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    ),
    "Qwen3-VL-8B": ("qwen3_vl", {**QWEN3_VL, "out_hidden_size": 4096}),
    "Qwen3-VL-30B-A3B": ("qwen3_vl_moe", {**QWEN3_VL, "out_hidden_size": 2048}),
    "Qwen3.5-35B-A3B": ("qwen3_5", {**QWEN3_VL, "out_hidden_size": 2048, "deepstack_visual_indexes": []}),
    "Qwen2.5-VL-3B": ("qwen2_5_vl", {**QWEN2_5_VL, "out_hidden_size": 2048}),
    "Qwen2.5-VL-7B": ("qwen2_5_vl", {**QWEN2_5_VL, "out_hidden_size": 3584}),
}  # fmt: skip
"""Family and ``vision_config`` of published models."""


def tower(vision: dict[str, Any]) -> Tower:
    found = tower_of({"vision_config": vision})
    assert found is not None
    return found


def module(family: str, vision: dict[str, Any], attention: str = "sdpa") -> Any:
    """Return the tower of transformers; published configs of Qwen2.5-VL call the channels otherwise than its class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

    classes = {
        "qwen2_5_vl": Qwen2_5_VisionTransformerPretrainedModel, "qwen3_5": Qwen3_5VisionModel,
        "qwen3_vl": Qwen3VLVisionModel, "qwen3_vl_moe": Qwen3VLMoeVisionModel,
    }  # fmt: skip
    config = CONFIG_MAPPING[family](vision_config=dict(vision)).vision_config
    config._attn_implementation = attention
    return classes[family](config)


def small(family: str, seed: int) -> dict[str, Any]:
    """Return a small ``vision_config`` with sizes drawn at random."""
    draw = random.Random(seed)
    heads = draw.choice([2, 3, 4])
    vision: dict[str, Any] = {
        "depth": draw.randint(2, 4), "hidden_size": 4 * heads * draw.randint(1, 4), "num_heads": heads,
        "intermediate_size": draw.randint(10, 90), "out_hidden_size": draw.randint(8, 60), "patch_size": 4,
        "temporal_patch_size": 2, "spatial_merge_size": 2,
    }  # fmt: skip
    if family == "qwen2_5_vl":
        return {**vision, "window_size": 16, "fullatt_block_indexes": [1]}
    inner = [] if family == "qwen3_5" else draw.choice([[], [0], [0, 1]])
    return {**vision, "num_position_embeddings": 16, "deepstack_visual_indexes": inner}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_towers(name: str) -> None:
    with torch.device("meta"):
        built = module(*PUBLISHED[name])
    assert tower(PUBLISHED[name][1]).parameters == sum(parameter.numel() for parameter in built.parameters())


SMALL = [(family, seed) for family in ("qwen3_vl", "qwen2_5_vl", "qwen3_5") for seed in range(3)]


@pytest.mark.parametrize(("family", "seed"), SMALL)
def test_tensors_of_small_towers(family: str, seed: int) -> None:
    vision = small(family, seed)
    with torch.device("meta"):
        built = module(family, vision)
    sizes = [numel for numel, count in tower(vision).tensors() for _ in range(count)]
    assert sorted(sizes) == sorted(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize("grids", [[(1, 8, 8)], [(1, 4, 6), (1, 6, 14), (2, 10, 4)]])
@pytest.mark.parametrize(("family", "seed"), SMALL)
def test_flops_equal_those_that_torch_counts(family: str, seed: int, grids: list[tuple[int, int, int]]) -> None:
    """Windows of Qwen2.5-VL are 4 patches wide here, smaller ones at the borders included."""
    vision = small(family, seed)
    built, patches = module(family, vision, "eager"), sum(t * h * w for t, h, w in grids)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        built(torch.zeros(patches, 96), grid_thw=torch.tensor(grids))
    assert tower(vision).forward_flops(grids) == counter.get_total_flops()


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(("family", "seed"), SMALL)
def test_what_is_kept_equals_what_autograd_saves(family: str, seed: int, recomputed: bool) -> None:
    """Per patch, but for indices and scales of a few numbers."""
    vision = small(family, seed)
    built, grid = module(family, vision), torch.tensor([(1, 8, 8)])
    if recomputed:
        built.train().gradient_checkpointing_enable({"use_reentrant": False})
    held = {tensor.untyped_storage().data_ptr() for tensor in [*built.parameters(), *built.buffers()]}
    storages: dict[int, torch.UntypedStorage] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        built(torch.randn(64, 96), grid_thw=grid)
    kept = sum(storage.nbytes() for storage in storages.values()) / 64
    formula = tower(vision).kept_bytes(4, recomputed=recomputed)
    rotary = 8 * vision["hidden_size"] // vision["num_heads"] if recomputed else 0  # saved past the hooks
    assert 0 <= kept - (formula - rotary) <= 48


@pytest.mark.parametrize(
    "config", [{}, {"vision_config": None}, {"vision_config": {"model_type": "other", "depth": 3}}]
)
def test_a_config_that_says_too_little(config: dict[str, Any]) -> None:
    assert tower_of(config) is None
