"""Gemma 4: checkpoints of the language model alone.

SGLang reads sizes of heads from vision-language checkpoints only, as it names them itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime_engine_plugin.hook_points import require

_PARSE = "sglang.srt.utils.hf_transformers.config.HfModelConfigParser.parse"


def in_sglang_names(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around the reading of a config: ``head_dim`` is that of layers without a window, ``swa_*`` are of the others."""
    config = original(*args, **kwargs)
    if config.model_type == "gemma4_text" and not hasattr(config, "swa_head_dim"):
        config.swa_head_dim = config.swa_v_head_dim = config.head_dim
        config.swa_num_key_value_heads = config.num_key_value_heads
        config.head_dim = config.v_head_dim = config.global_head_dim
        config.num_key_value_heads = config.num_global_key_value_heads or config.num_key_value_heads
    return config


def register() -> None:
    """Register the hook."""
    require(_PARSE, "self model trust_remote_code revision kwargs")
    HookRegistry.register(_PARSE, in_sglang_names, HookType.AROUND)
