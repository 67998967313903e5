"""Qwen2.5-VL: ``--spec slime_plugins.models.qwen2_5_vl get_qwen2_5_vl_model_provider``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.arguments.args import Args

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig


def get_qwen2_5_vl_model_provider(
    args: Args,
    config: TransformerConfig,
    vp_stage: int | None = None,
    *,
    pre_process: bool = True,
    post_process: bool = True,
) -> torch.nn.Module:
    """Return one stage of Qwen2.5-VL: built-in layers, and on the first stage the vision tower."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    from slime.backends.megatron_utils.model.layer_specs import decoder_block_spec
    from slime.backends.megatron_utils.model.vision import vision_language_model

    return vision_language_model(
        args,
        config,
        decoder_block_spec,
        Qwen2_5_VisionTransformerPretrainedModel,
        interleaved=False,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
    )
