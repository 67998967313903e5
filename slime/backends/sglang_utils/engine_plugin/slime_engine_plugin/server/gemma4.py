"""Gemma 4: checkpoints of the language model alone, and engines on a CPU.

SGLang reads sizes of heads from vision-language checkpoints only, as it names them itself. On a CPU it refuses Gemma 4
torch-native attention by name, which has what the dense models need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime_engine_plugin.hook_points import require

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_PARSE = "sglang.srt.utils.hf_transformers.config.HfModelConfigParser.parse"
_HOOKS = "sglang.srt.arg_groups.model_hook"
_CHECK = f"{_HOOKS}.handle_model_specific_adjustments"
ARCHITECTURES = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")


def in_sglang_names(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around the reading of a config: ``head_dim`` is that of layers without a window, ``swa_*`` are of the others."""
    config = original(*args, **kwargs)
    if config.model_type == "gemma4_text" and not hasattr(config, "swa_head_dim"):
        config.swa_head_dim = config.swa_v_head_dim = config.head_dim
        config.swa_num_key_value_heads = config.num_key_value_heads
        config.head_dim = config.v_head_dim = config.global_head_dim
        config.num_key_value_heads = config.num_global_key_value_heads or config.num_key_value_heads
    return config


def accepting(original: Callable[[ServerArgs], Any], server_args: ServerArgs) -> Any:
    """Around the checks of the model: torch-native attention passes as the other one of CPUs, for Gemma 4 alone."""
    from sglang.srt.arg_groups import model_hook

    architectures = model_hook.model_config_of(server_args).hf_config.architectures or ()
    if not set(architectures).intersection(ARCHITECTURES):
        return original(server_args)
    stock = model_hook.attention_backends_of

    def accepted(config: Any) -> tuple[str, ...]:
        return tuple("intel_amx" if name == "torch_native" else name for name in stock(config))

    model_hook.attention_backends_of = accepted
    try:
        return original(server_args)
    finally:
        model_hook.attention_backends_of = stock


def register() -> None:
    """Register the hooks."""
    require(_PARSE, "self model trust_remote_code revision kwargs")
    HookRegistry.register(_PARSE, in_sglang_names, HookType.AROUND)
    if not torch.cuda.is_available():
        require(_CHECK, "server_args")
        for name, parameters in (("attention_backends_of", "cfg"), ("model_config_of", "server_args")):
            require(f"{_HOOKS}.{name}", parameters)
        HookRegistry.register(_CHECK, accepting, HookType.AROUND)
