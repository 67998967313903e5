"""Latent attention (DeepSeek-V3 and its successors) on a CPU.

SGLang has no rule for torch-native attention and takes that of Triton, which computes a prefill from whole heads, where
the backend expects latents. The absorbed form has latents in every pass.

Of rotary embeddings its CPU path has YaRN's alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime_engine_plugin.hook_points import require

if TYPE_CHECKING:
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    from torch import nn

_ROPE = "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu"


def absorbed(attention: nn.Module, forward_batch: ForwardBatch) -> AttnForwardMethod:
    """Choose the absorbed form for every pass."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA


def with_plain_rope(
    original: Callable[..., RotaryEmbedding],
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    *args: Any,
) -> RotaryEmbedding:
    """Around ``get_rope_cpu``: rotation without scaling (Moonlight) is that of every other family."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    if rope_scaling is None:
        return get_rope(head_size, rotary_dim, max_position, base, is_neox_style)
    return original(head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, *args)


def register() -> None:
    """Register the rule of ``torch_native``, the backend of engines on a CPU, and the hook."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    require(
        _ROPE,
        "head_size rotary_dim max_position base is_neox_style rope_scaling dtype partial_rotary_factor device",
    )
    AttentionBackendRegistry.register("torch_native", absorbed)
    HookRegistry.register(_ROPE, with_plain_rope, HookType.AROUND)
