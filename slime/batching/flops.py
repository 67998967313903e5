"""Forward FLOPs of a transformer per sequence: the weight by which work is balanced and throughput reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class FlopsModel:
    """Forward FLOPs of a sequence of L tokens are ``linear * L + quadratic * L^2`` (causal attention counts half)."""

    linear: float
    quadratic: float

    def forward(self, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return float64 [n], forward FLOPs of each sequence."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.linear * tokens + self.quadratic * tokens * tokens


def flops_model(args: Any) -> FlopsModel:
    """Read the model's shape from Megatron's flags.

    Per token and layer: projections, attention output, MLP ``6 * h * ffn`` (gated; 4 without a gate), for MoE layers
    ``topk`` routed experts plus the shared one; the LM head once. Attention per layer: scores and values of all heads.
    With multi-latent attention the projections go through the low ranks. Raises AttributeError naming a missing flag.
    """
    heads, hidden = args.num_attention_heads, args.hidden_size
    if getattr(args, "multi_latent_attention", False):
        projections, d_qk, d_v = _latent_projections(args)
    else:
        d_qk = d_v = getattr(args, "kv_channels", None) or hidden // heads
        grouped = getattr(args, "group_query_attention", True) and getattr(args, "num_query_groups", None)
        groups = args.num_query_groups if grouped else heads
        projections = 2 * hidden * (heads + 2 * groups) * d_qk
    attention_out = 2 * heads * d_v * hidden
    layers = args.num_layers
    moe_layers = sum(_moe_pattern(args))
    mlp = (layers - moe_layers) * _mlp(args, _dense_width(args))
    if moe_layers:
        mlp += moe_layers * _mlp(args, _moe_width(args))
    head = 2 * hidden * (getattr(args, "padded_vocab_size", None) or args.vocab_size)
    return FlopsModel(
        linear=float(layers * (projections + attention_out) + mlp + head),
        quadratic=float(layers * heads * (d_qk + d_v)),  # 2 * heads * L^2 * d each for scores and values, half causal
    )


def forward_flops(args: Any, lengths: Sequence[int]) -> float:
    """Return the FLOPs of one forward pass over these sequences, on all ranks together."""
    return float(flops_model(args).forward(lengths).sum())


def _latent_projections(args: Any) -> tuple[float, int, int]:
    heads, hidden = args.num_attention_heads, args.hidden_size
    d_qk = args.qk_head_dim + args.qk_pos_emb_head_dim
    if args.q_lora_rank:
        query = 2 * args.q_lora_rank * (hidden + heads * d_qk)
    else:
        query = 2 * hidden * heads * d_qk
    down = 2 * hidden * (args.kv_lora_rank + args.qk_pos_emb_head_dim)
    up = 2 * args.kv_lora_rank * heads * (args.qk_head_dim + args.v_head_dim)
    return query + down + up, d_qk, args.v_head_dim


def _mlp(args: Any, width: int) -> int:
    return int((6 if getattr(args, "swiglu", True) else 4) * args.hidden_size * width)


def _dense_width(args: Any) -> int:
    return int(getattr(args, "ffn_hidden_size", None) or 4 * args.hidden_size)


def _moe_width(args: Any) -> int:
    routed = (getattr(args, "moe_ffn_hidden_size", None) or _dense_width(args)) * args.moe_router_topk
    return int(routed + (getattr(args, "moe_shared_expert_intermediate_size", None) or 0))


def _moe_pattern(args: Any) -> list[int]:
    """One 0/1 entry per layer: whether it has experts."""
    if not getattr(args, "num_experts", None):
        return [0] * args.num_layers
    return moe_layer_pattern(getattr(args, "moe_layer_freq", 1), args.num_layers)


def moe_layer_pattern(frequency: int | Sequence[int], num_layers: int) -> list[int]:
    """Return one 0/1 entry per layer from Megatron's ``moe_layer_freq``: every n-th layer, or the pattern itself."""
    if isinstance(frequency, int):
        return [int(layer % frequency == 0) for layer in range(num_layers)]
    if len(frequency) != num_layers:
        raise ValueError(f"--moe-layer-freq has {len(frequency)} entries for {num_layers} layers")
    return [int(bool(entry)) for entry in frequency]
