"""Gemma 4: ``--spec slime_plugins.models.gemma4 get_gemma4_model_provider``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.arguments.args import Args

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig


def get_gemma4_model_provider(
    args: Args,
    config: TransformerConfig,
    vp_stage: int | None = None,
    *,
    pre_process: bool = True,
    post_process: bool = True,
) -> torch.nn.Module:
    """Return one stage of the language model, dense or with experts, of layers of two kinds."""
    from slime.backends.megatron_utils.model.gemma import gemma_model

    return gemma_model(
        args, config, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage, generation=4
    )
