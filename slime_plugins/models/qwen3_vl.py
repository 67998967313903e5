"""Qwen3-VL: ``--spec slime_plugins.models.qwen3_vl get_qwen3_vl_model_provider``; with experts ``..._vl_moe_...``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.arguments.args import Args

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig


def get_qwen3_vl_model_provider(
    args: Args,
    config: TransformerConfig,
    vp_stage: int | None = None,
    *,
    pre_process: bool = True,
    post_process: bool = True,
) -> torch.nn.Module:
    """Return one stage of Qwen3-VL: built-in layers, and on the first stage the vision tower."""
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    from slime.backends.megatron_utils.model.layer_specs import decoder_block_spec
    from slime.backends.megatron_utils.model.vision import vision_language_model

    return vision_language_model(
        args,
        config,
        decoder_block_spec,
        Qwen3VLVisionModel,
        interleaved=True,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
    )


def get_qwen3_vl_moe_model_provider(
    args: Args,
    config: TransformerConfig,
    vp_stage: int | None = None,
    *,
    pre_process: bool = True,
    post_process: bool = True,
) -> torch.nn.Module:
    """Return one stage of Qwen3-VL with experts: built-in layers, and on the first stage the vision tower."""
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

    from slime.backends.megatron_utils.model.layer_specs import decoder_block_spec
    from slime.backends.megatron_utils.model.vision import vision_language_model

    return vision_language_model(
        args,
        config,
        decoder_block_spec,
        Qwen3VLMoeVisionModel,
        interleaved=True,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
    )
