"""GLM-5, 5.1 and 5.2: ``--spec slime_plugins.models.glm5.glm5 get_glm5_spec``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.arguments.args import Args

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import MLATransformerConfig


def get_glm5_spec(args: Args, config: MLATransformerConfig, vp_stage: int | None) -> Any:
    """Return the block spec of this pipeline stage: sparse latent attention, whose selections layers may share."""
    from slime.backends.megatron_utils.model.sparse_attention import sparse_block_spec

    return sparse_block_spec(args, config, vp_stage)
