"""DeepSeek-V3.2: ``--spec slime_plugins.models.deepseek_v32 get_deepseek_v32_spec``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.arguments.args import Args

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import MLATransformerConfig


def get_deepseek_v32_spec(args: Args, config: MLATransformerConfig, vp_stage: int | None) -> Any:
    """Return the block spec of this pipeline stage: sparse latent attention in every layer."""
    from slime.backends.megatron_utils.model.sparse_attention import sparse_block_spec

    return sparse_block_spec(args, config, vp_stage)
