"""Gated delta nets (Qwen3-Next, Qwen3.5) on a CPU: kernels in plain torch, also of their norms, which are Triton's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime_engine_plugin.hook_points import require

_NORMS = "sglang.kernels.ops.attention.fla"
_QWEN3_5 = f"{_NORMS}.layernorm_gated.RMSNorm.forward"
_QWEN3_NEXT = f"{_NORMS}.fused_norm_gate.FusedRMSNormGated.forward"


def norm_and_gate(
    original: Callable[..., Any], norm: Any, x: torch.Tensor, gate: torch.Tensor | None = None, *args: Any, **kw: Any
) -> Any:
    """Around the norms' ``forward``: ``norm(x) * activation(gate)``."""
    grouped = getattr(norm, "group_size", None) is not None or not getattr(norm, "norm_before_gate", True)
    if gate is None or grouped or args or kw:
        return original(norm, x, gate, *args, **kw)
    hidden, gate = x.float(), gate.float()
    hidden = hidden * (hidden.square().mean(dim=-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.float()
    sigmoid = gate.sigmoid()
    return (hidden * (sigmoid if norm.activation == "sigmoid" else gate * sigmoid)).to(x.dtype)


def register() -> None:
    """Register the hooks, and the kernels, which models look up while they are imported.

    No other names: SGLang takes one that it finds for a kernel.
    """
    from sgl_kernel import mamba, qwen3_5

    kernels = {name: f for module in (mamba, qwen3_5) for name, f in vars(module).items() if name.endswith("_cpu")}
    setattr(torch.ops, "sgl_kernel", SimpleNamespace(**kernels))  # noqa: B010
    require(_QWEN3_5, "self x z")
    require(_QWEN3_NEXT, "self x g residual prenorm residual_in_fp32")
    HookRegistry.register(_QWEN3_5, norm_and_gate, HookType.AROUND)
    HookRegistry.register(_QWEN3_NEXT, norm_and_gate, HookType.AROUND)
