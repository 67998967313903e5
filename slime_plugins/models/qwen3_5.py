"""Qwen3.5, its language model: ``--spec slime_plugins.models.qwen3_5 get_qwen3_5_spec``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.arguments.args import Args

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def get_qwen3_5_spec(args: Args, config: TransformerConfig, vp_stage: int | None) -> Any:
    """Return the block spec of this pipeline stage: gated delta nets and gated attention, dense or with experts."""
    from slime_plugins.models.linear_attention import hybrid_block_spec

    return hybrid_block_spec(args, config, vp_stage, fused=False)
