"""Qwen3.5 with images: ``--spec slime_plugins.models.qwen3_5_vl get_qwen3_5_vl_model_provider``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.arguments.args import Args

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig


def get_qwen3_5_vl_model_provider(
    args: Args,
    config: TransformerConfig,
    vp_stage: int | None = None,
    *,
    pre_process: bool = True,
    post_process: bool = True,
) -> torch.nn.Module:
    """Return one stage of Qwen3.5, dense or with experts; on the first stage with the vision tower."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    from slime.backends.megatron_utils.model.vision import vision_language_model
    from slime_plugins.models.qwen3_5 import get_qwen3_5_spec

    return vision_language_model(
        args,
        config,
        get_qwen3_5_spec,
        Qwen3_5VisionModel,
        interleaved=True,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
    )
