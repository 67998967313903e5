"""gpt-oss: ``--spec slime_plugins.models.gpt_oss get_gpt_oss_model_provider``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.arguments.args import Args

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig


def get_gpt_oss_model_provider(
    args: Args,
    config: TransformerConfig,
    vp_stage: int | None = None,
    *,
    pre_process: bool = True,
    post_process: bool = True,
) -> torch.nn.Module:
    """Return one stage: attention with sinks, and a window in every second layer; clamped experts with biases."""
    from slime.backends.megatron_utils.model.gpt_oss import gpt_oss_model

    return gpt_oss_model(args, config, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
