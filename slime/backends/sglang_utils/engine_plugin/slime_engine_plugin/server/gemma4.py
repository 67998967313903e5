"""Gemma 4: checkpoints of the language model alone, and the router's scale after a push and on a CPU.

SGLang reads sizes of heads from vision-language checkpoints only, as it names them itself. It multiplies the scale into
the weight of a norm once, at the first token, and its norm for CPUs does not read that weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime_engine_plugin.hook_points import require

_PARSE = "sglang.srt.utils.hf_transformers.config.HfModelConfigParser.parse"
_ROUTER = "sglang.srt.models.gemma4_causal.Gemma4Router"
_MODELS = (
    "sglang.srt.models.gemma4_causal.Gemma4ForCausalLM",
    "sglang.srt.models.gemma4_mm.Gemma4ForConditionalGeneration",
)


def in_sglang_names(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around the reading of a config: ``head_dim`` is that of layers without a window, ``swa_*`` are of the others."""
    config = original(*args, **kwargs)
    if config.model_type == "gemma4_text" and not hasattr(config, "swa_head_dim"):
        config.swa_head_dim = config.swa_v_head_dim = config.head_dim
        config.swa_num_key_value_heads = config.num_key_value_heads
        config.head_dim = config.v_head_dim = config.global_head_dim
        config.num_key_value_heads = config.num_global_key_value_heads or config.num_key_value_heads
    return config


def scaled_again(result: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """After weights were loaded, at the start and in pushes: in place, as graphs read the norm's weight."""
    module: Any
    for module in model.modules():
        if hasattr(module, "fuse_scale"):
            module.fuse_scale()


def routed(router: Any, x: torch.Tensor) -> torch.Tensor:
    """Replace the router's ``forward``: return ``[tokens, experts]``."""
    logits, _ = router.proj(router.norm(x) * (router.scale * router.root_size).to(x.dtype))
    return logits


def register() -> None:
    """Register the hooks."""
    require(_PARSE, "self model trust_remote_code revision kwargs")
    require(f"{_ROUTER}.fuse_scale", "self")
    require(f"{_ROUTER}.forward", "self x")
    for model in _MODELS:
        require(f"{model}.load_weights", "self weights")
    HookRegistry.register(_PARSE, in_sglang_names, HookType.AROUND)
    for model in _MODELS:
        HookRegistry.register(f"{model}.load_weights", scaled_again, HookType.AFTER)
    if not torch.cuda.is_available():
        HookRegistry.register(f"{_ROUTER}.forward", routed, HookType.REPLACE)
