"""GLM-4 (0414): ``--spec slime_plugins.models.glm4 get_glm_spec``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.arguments.args import Args

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def get_glm_spec(args: Args, config: TransformerConfig, vp_stage: int | None) -> Any:
    """Return the block spec of this pipeline stage.

    Attention and MLP are Megatron's; ``--post-self-attn-layernorm`` and ``--post-mlp-layernorm`` put norms on their
    outputs.
    """
    from slime.backends.megatron_utils.model.layer_specs import decoder_block_spec

    return decoder_block_spec(args, config, vp_stage)
