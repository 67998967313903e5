"""Plain torch forms of the kernels of Qwen3.5's layers, besides those of its delta nets."""

from __future__ import annotations

import torch


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiply ``x`` by ``sigmoid(gate)``, in place."""
    x.mul_(gate.reshape(x.shape).sigmoid())


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys with normalized heads, [tokens x heads, head_dim] each."""
    return _normalized(q.reshape(-1, head_dim), q_weight, eps), _normalized(k.reshape(-1, head_dim), k_weight, eps)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the same where the gate of a head follows its query; return the gates too."""
    q, gate = q_gate.reshape(-1, 2 * head_dim).chunk(2, dim=-1)
    return *fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim), gate.contiguous()


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: torch.Tensor, ba: torch.Tensor, num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the projections of a delta net: qkv, z [tokens, heads, dim], and what b and a are made of."""
    qkv, z = qkvz.split([2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim, num_v_heads * head_v_dim], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return qkv.contiguous(), z.reshape(-1, num_v_heads, head_v_dim), b.contiguous(), a.contiguous()


def _normalized(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm, whose weight is stored as its difference from 1."""
    hidden = x.float()
    return (hidden * (hidden.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + weight.float())).to(x.dtype)
