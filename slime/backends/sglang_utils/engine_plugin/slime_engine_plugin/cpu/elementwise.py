"""Norm and rotary embedding on a CPU, in fewer torch calls: with few sequences a step is nothing but calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime_engine_plugin.hook_points import require

if TYPE_CHECKING:
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

_NORM = "sglang.srt.layers.layernorm.RMSNorm.forward_native"
_ROTARY = "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native"

_LAST: list[torch.Tensor] = []
"""The table of an embedding, the positions of the last layer that was computed, and its cosines and sines for them."""


def norm(
    original: Callable[..., Any],
    layer: RMSNorm,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: object = None,
) -> Any:
    """Around ``RMSNorm.forward_native``: float32 with float32 weights, where no cast can make a difference."""
    weight = layer.weight  # looking up a parameter takes as long as a small operation
    plain = (
        x.dtype == weight.dtype == torch.float32
        and x.shape[-1] == layer.hidden_size
        and post_residual_addition is None
        and layer.variance_size_override is None
        and layer.override_orig_dtype is None
        and (residual is None or (residual.dtype == torch.float32 and not layer.fp32_residual))
    )
    if not plain:
        return original(layer, x, residual, post_residual_addition, quant_linear)
    if residual is None:
        return torch.rms_norm(x, weight.shape, weight, layer.variance_epsilon)
    x = x + residual
    return torch.rms_norm(x, weight.shape, weight, layer.variance_epsilon), x


def rotate(
    original: Callable[..., Any],
    embedding: RotaryEmbedding,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: object = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Around ``RotaryEmbedding.forward_native``: whole heads in halves (GPT-NeoX style), by signed sines."""
    plain = (
        embedding.is_neox_style
        and embedding.rotary_dim == embedding.head_size
        and offsets is None
        and fused_set_kv_buffer_arg is None
        and positions.dim() == 1
        and positions.dtype == torch.int64
        and query.dtype == key.dtype == embedding.cos_sin_cache.dtype
        and has_stock_rotation(type(embedding))
    )
    if not plain:
        return original(embedding, positions, query, key, offsets, fused_set_kv_buffer_arg)
    half = embedding.head_size // 2
    cos, sin = rotation_table(embedding.cos_sin_cache, positions)
    heads = [x.view(len(positions), -1, embedding.head_size) for x in (query, key)]
    rotated = [torch.addcmul(x * cos, x.roll(half, dims=-1), sin) for x in heads]
    return rotated[0].view(query.shape), rotated[1].view(key.shape)


def rotation_table(cos_sin: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines, and sines with the sign of the other half, [tokens, 1, head_dim]: once for all layers of a pass."""
    if not (_LAST and _LAST[0] is cos_sin and torch.equal(_LAST[1], positions)):
        cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)
        _LAST[:] = cos_sin, positions.clone(), torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return _LAST[2], _LAST[3]


def has_stock_rotation(kind: type[RotaryEmbedding]) -> bool:
    """Return True if this kind of embedding differs from the base class in nothing but its table."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    return kind.forward_native is RotaryEmbedding.forward_native


def register() -> None:
    """Register the hooks, unless SGLang has its own kernels for this processor; raises OtherSGLangError."""
    from sglang.srt.utils import cpu_has_amx_support

    if cpu_has_amx_support():
        return
    require(_NORM, "self x residual post_residual_addition quant_linear")
    require(_ROTARY, "self positions query key offsets fused_set_kv_buffer_arg")
    HookRegistry.register(_NORM, norm, HookType.AROUND)
    HookRegistry.register(_ROTARY, rotate, HookType.AROUND)
