"""A decoder layer on a CPU in a third of the calls: with few sequences a step is nothing but calls.

Norms, projections and rotary embedding of Qwen3's dense layers are called as torch functions here, and queries and keys
share their norm and rotation. Attention stays where it is. Whatever is not a plain float32 layer of one rank (other
precision, quantized or with adapters, several ranks, replaced modules) is left to SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch.nn.functional import linear, silu

from slime_engine_plugin.cpu.elementwise import has_stock_rotation, rotation_table
from slime_engine_plugin.hook_points import require

if TYPE_CHECKING:
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.models.qwen3 import Qwen3DecoderLayer

_LAYER = "sglang.srt.models.qwen3.Qwen3DecoderLayer.forward"


@dataclass(frozen=True)
class Parts:
    """Parts of a plain layer; parameters are read at every use, since others may take their places."""

    input_norm: Any
    qkv: Any
    q_norm: Any
    k_norm: Any
    rotary: Any
    attention: Any
    out: Any
    mlp_norm: Any
    gate_up: Any
    down: Any
    q_heads: int
    heads: int
    head_dim: int


_PARTS: WeakKeyDictionary[Any, Parts | None] = WeakKeyDictionary()


def forward(
    original: Callable[..., Any],
    layer: Qwen3DecoderLayer,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    forward_batch: ForwardBatch,
    residual: torch.Tensor | None,
    post_residual_addition: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Around ``Qwen3DecoderLayer.forward``: hidden states of the layer and the residual, both [tokens, hidden]."""
    if layer not in _PARTS:
        _PARTS[layer] = _parts_of(layer)
    parts = _PARTS[layer]
    plain = (
        parts is not None
        and post_residual_addition is None
        and hidden_states.dtype == torch.float32
        and hidden_states.dim() == 2
        and len(hidden_states) > 0
        and positions.dim() == 1
        and positions.dtype == torch.int64
    )
    if not plain or parts is None:
        return original(layer, positions, hidden_states, forward_batch, residual, post_residual_addition)
    residual = hidden_states if residual is None else hidden_states + residual
    qkv = linear(_norm(residual, parts.input_norm), parts.qkv.weight, parts.qkv.bias)
    q, k, v = _query_key_value(qkv, positions, parts)
    attended = linear(parts.attention(q, k, v, forward_batch), parts.out.weight, parts.out.bias)
    residual = attended.add_(residual)
    gate, up = linear(_norm(residual, parts.mlp_norm), parts.gate_up.weight).chunk(2, dim=-1)
    return linear(silu(gate).mul_(up), parts.down.weight), residual


def _norm(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    weight = norm.weight
    return torch.rms_norm(x, weight.shape, weight, norm.variance_epsilon)


def _query_key_value(
    qkv: torch.Tensor, positions: torch.Tensor, parts: Parts
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key (normed and rotated) and value of qkv, [tokens, heads * head_dim]."""
    tokens, size = len(qkv), parts.heads * parts.head_dim
    both = qkv[:, :size].view(tokens, parts.heads, parts.head_dim)
    scale = torch.rsqrt_(both.square().mean(dim=-1, keepdim=True).add_(parts.q_norm.variance_epsilon))
    weights = torch.cat((
        parts.q_norm.weight.expand(parts.q_heads, -1), parts.k_norm.weight.expand(parts.heads - parts.q_heads, -1)
    ))  # fmt: skip
    both = (both * scale).mul_(weights)
    cos, sin = rotation_table(parts.rotary.cos_sin_cache, positions)
    rotated = torch.addcmul(both * cos, both.roll(parts.head_dim // 2, dims=-1), sin).view(tokens, size)
    queries = parts.q_heads * parts.head_dim
    return rotated[:, :queries], rotated[:, queries:], qkv[:, size:]


def _parts_of(layer: Qwen3DecoderLayer) -> Parts | None:
    """Return the parts of a layer whose modules are SGLang's own, of one rank and not quantized; else None."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.models.qwen2 import Qwen2MLP
    from sglang.srt.models.qwen3 import Qwen3Attention
    from sglang.srt.runtime_context import get_exec, get_parallel

    attention, mlp = layer.self_attn, layer.mlp
    kinds = {type(attention): Qwen3Attention, type(mlp): Qwen2MLP}
    if any(kind is not expected for kind, expected in kinds.items()):
        return None
    norms = (layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm)
    linears = {
        attention.qkv_proj: QKVParallelLinear, attention.o_proj: RowParallelLinear,
        mlp.gate_up_proj: MergedColumnParallelLinear, mlp.down_proj: RowParallelLinear,
    }  # fmt: skip
    parallel, rotary = get_parallel(), attention.rotary_emb
    plain = (
        get_exec().deterministic.rl_on_policy_target is None
        and parallel.tp_size == parallel.attn_tp_size == parallel.pp_size == 1
        and layer.layer_communicator._sp_variant is None
        and type(attention.attn) is RadixAttention
        and type(mlp.act_fn) is SiluAndMul
        and all(type(module) is kind for module, kind in linears.items())  # adapters replace them
        and all(type(module.quant_method) is UnquantizedLinearMethod for module in linears)
        and all(not module.skip_bias_add and module.weight.dtype == torch.float32 for module in linears)
        and mlp.gate_up_proj.bias is None
        and mlp.down_proj.bias is None
        and all(type(norm) is RMSNorm and _is_plain_norm(norm) for norm in norms)
        and attention.q_norm.variance_epsilon == attention.k_norm.variance_epsilon
        and attention.q_norm.hidden_size == attention.head_dim
        and rotary.is_neox_style
        and rotary.rotary_dim == rotary.head_size == attention.head_dim
        and rotary.cos_sin_cache.dtype == torch.float32
        and has_stock_rotation(type(rotary))
    )
    if not plain:
        return None
    return Parts(
        layer.input_layernorm, attention.qkv_proj, attention.q_norm, attention.k_norm, rotary, attention.attn,
        attention.o_proj, layer.post_attention_layernorm, mlp.gate_up_proj, mlp.down_proj,
        attention.num_heads, attention.num_heads + attention.num_kv_heads, attention.head_dim,
    )  # fmt: skip


def _is_plain_norm(norm: RMSNorm) -> bool:
    return (
        norm.weight.dtype == torch.float32
        and norm.variance_size_override is None
        and norm.override_orig_dtype is None
        and not norm.fp32_residual
    )


def register() -> None:
    """Register the hook, unless SGLang has its own kernels for this processor; raises OtherSGLangError."""
    from sglang.srt.utils import cpu_has_amx_support

    if cpu_has_amx_support():
        return
    require(_LAYER, "self positions hidden_states forward_batch residual post_residual_addition")
    HookRegistry.register(_LAYER, forward, HookType.AROUND)
