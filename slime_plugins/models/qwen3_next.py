"""Qwen3-Next: ``--spec slime_plugins.models.qwen3_next get_qwen3_next_spec``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.arguments.args import Args

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def get_qwen3_next_spec(args: Args, config: TransformerConfig, vp_stage: int | None) -> Any:
    """Return the block spec of this pipeline stage: gated delta nets and gated attention, experts in every layer."""
    from slime_plugins.models.linear_attention import hybrid_block_spec

    return hybrid_block_spec(args, config, vp_stage, fused=True)
