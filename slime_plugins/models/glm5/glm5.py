"""GLM-5: ``--spec slime_plugins.models.glm5.glm5 get_glm5_spec``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.arguments.args import Args

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def get_glm5_spec(args: Args, config: TransformerConfig, vp_stage: int | None) -> Any:
    """Raise ValueError: its sparse attention does not take packed sequences in megatron-core."""
    from slime.backends.megatron_utils.weights.maps import UNSUPPORTED

    reason = UNSUPPORTED["glm_moe_dsa"]
    raise ValueError(f"--spec slime_plugins.models.glm5.glm5 get_glm5_spec: GLM-5 cannot be trained: {reason}")
