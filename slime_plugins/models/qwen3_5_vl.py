"""Qwen3.5 with images: ``--spec slime_plugins.models.qwen3_5_vl get_qwen3_5_vl_model_provider``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.arguments.args import Args

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def get_qwen3_5_vl_model_provider(args: Args, config: TransformerConfig, vp_stage: int | None) -> Any:
    """Raise ValueError: megatron-core has no such vision tower. The message names what trains the language model."""
    raise ValueError(
        "--spec slime_plugins.models.qwen3_5_vl get_qwen3_5_vl_model_provider: megatron-core has no vision tower for "
        "Qwen3.5. On prompts without images give --spec slime_plugins.models.qwen3_5 get_qwen3_5_spec: it trains the "
        f"language model of {args.hf_checkpoint} and leaves the vision tower as it is"
    )
