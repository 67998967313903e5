"""The layers of gpt-oss. Import after ``import_megatron()``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu

from slime.arguments.args import Args
from slime.backends.megatron_utils.model.layer_specs import decoder_block_spec
from slime.backends.megatron_utils.model.provider import gpt_model
from slime.models.layer_attention import config_and_layers, yarn

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def gpt_oss_model(
    args: Args, config: TransformerConfig, *, pre_process: bool, post_process: bool, vp_stage: int | None
) -> torch.nn.Module:
    """Return one stage of gpt-oss as ``config.json`` of ``--hf-checkpoint`` describes it.

    All of it is in Megatron's configuration: the experts' ``min(g, 7) sigmoid(1.702 g) (clamp(u, -7, 7) + 1)``, sinks
    as offsets of the softmax, windows by layer, YaRN without rounding. Raises ValueError for a checkpoint of another
    number of layers, and for what is not built (``not_built``).
    """
    found, layers = config_and_layers(args.hf_checkpoint, config.num_layers)
    config.activation_func, config.bias_activation_fusion = quick_gelu, False
    config.activation_func_clamp_value, config.glu_linear_offset = float(found.get("swiglu_limit", 7.0)), 1.0
    config.softmax_type = "learnable"
    windows = [layer.window for layer in layers]
    config.window_size = (max(window or 1 for window in windows) - 1, 0)
    config.window_attn_skip_freq = [int(window is not None) for window in windows]
    for name, value in yarn(found).items():  # not fields of Megatron's configuration, but read from it
        setattr(config, name, value)
    block = decoder_block_spec(args, config, vp_stage)
    stage: dict[str, Any] = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
    model: Any = gpt_model(args, config, block, positions="yarn", **stage)
    model.logits_may_be_overwritten = True  # see ``provider.model_provider``
    return model
