"""What a layer keeps for its backward pass, in bytes per token of a rank."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

from slime.arguments.plan.model_stages import Parallel
from slime.utils.model_shape import Experts, Latent, LayerKind, LinearAttention, ModelShape

FP32 = 4


@dataclass(frozen=True)
class Kept:
    """How activations are kept. ``element`` is the size of one in bytes; ``modules`` are recomputed ("selective")."""

    element: int = 2
    granularity: str | None = None
    method: str | None = None
    block: int = 1
    modules: frozenset[str] = frozenset()
    distributed: bool = False
    fused_activation: bool = True
    fused_rope: bool = True
    dropout: bool = False


def kept_of(args: Namespace, element: int) -> Kept:
    """Return how ``args`` keep activations."""
    selective = getattr(args, "recompute_granularity", None) == "selective"
    modules = set(getattr(args, "recompute_modules", None) or ["core_attn"]) if selective else set()
    if getattr(args, "moe_layer_recompute", False):
        modules.add("moe")
    return Kept(
        element=element,
        granularity=getattr(args, "recompute_granularity", None),
        method=getattr(args, "recompute_method", None),
        block=int(getattr(args, "recompute_num_layers", None) or 1),
        modules=frozenset(modules),
        distributed=bool(getattr(args, "distribute_saved_activations", False)),
        fused_activation=bool(getattr(args, "bias_swiglu_fusion", True)),
        fused_rope=bool(getattr(args, "apply_rope_fusion", True)),
        dropout=(getattr(args, "hidden_dropout", None) or 0) > 0,
    )


def layer_bytes(shape: ModelShape, kind: LayerKind, parallel: Parallel, kept: Kept) -> dict[str, float]:
    """Return what one layer keeps per token, by what recomputing can spare, before anything is spared.

    The accounting of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
    (https://arxiv.org/abs/2205.05198), section 4, with today's layers: flash attention keeps no score matrix, only
    queries, keys, values, its output and a log-sum-exp per head; a fused gated unit keeps its input, of twice the
    width; there is no dropout; what is outside of the tensor-parallel regions is divided under sequence parallelism
    only. The values are a view of the projection's output, so that all of it stays beside the rotated queries and
    keys: 4 bytes per token and hidden unit more than the paper's 34, of which its dropout masks (2) are left out.
    """
    e, h, sp = kept.element, shape.hidden, parallel.sp
    found = {"inputs": 2 * e * h / sp, "norms": 2 * e * h / sp}
    if shape.post_attention_norm or shape.post_mlp_norm:
        found["inputs"] += e * h / sp * (shape.post_attention_norm + shape.post_mlp_norm)
    if kept.dropout:
        found["inputs"] += 2 * h / sp  # a mask of one byte after attention and after the MLP
    if kind.linear:
        assert shape.linear is not None
        found |= _linear_attention(shape.linear, parallel.tp, e)
    elif shape.latent is not None:
        found |= _latent_attention(shape.latent, shape.heads, parallel, e)
    else:
        found |= _attention(shape, parallel.tp, e)
    if not kept.fused_rope and not kind.linear:
        found["softmax"] += 4 * e * (shape.latent.rope_dim if shape.latent else shape.head_dim)  # sines and cosines
    if kind.moe:
        assert shape.experts is not None
        return found | _experts(shape, shape.experts, parallel, kept)
    return found | {"mlp": _mlp(shape, shape.ffn, kept) / parallel.tp}


def spared(found: Mapping[str, float], kept: Kept) -> float:
    """Return the bytes per token that a layer keeps when ``kept.modules`` are recomputed."""
    names = set(found)
    without = {
        "core_attn": {"softmax"},  # queries, keys and values are its inputs and stay
        "layernorm": {"norms"},
        "mla_up_proj": {"latent_qkv"},
        "mlp": {"mlp"},
        "moe": {"router", "expert_inputs", "expert_hidden", "expert_outputs", "shared"},
        "moe_act": {"expert_outputs"},
        "shared_experts": {"shared"},
    }
    for module in kept.modules:
        names -= without.get(module, set())
    return sum(found[name] for name in names)


MLP_PARTS = frozenset({"mlp", "router", "expert_inputs", "expert_hidden", "expert_outputs", "shared"})


def gradient_bytes(found: Mapping[str, float]) -> float:
    """Return the bytes per token of the gradients that are there at once in a layer's backward pass.

    Those of the MLP's inner activations or those of the attention's, whichever are more.
    """
    mlp = sum(size for name, size in found.items() if name in MLP_PARTS)
    return max(mlp, sum(found.values()) - mlp - found["inputs"] - found["norms"])


def _attention(shape: ModelShape, tp: int, e: int) -> dict[str, float]:
    query, key = shape.heads * shape.head_dim, max(shape.groups, tp) * shape.head_dim
    projected, rotated = query + 2 * key, query + key
    found = {"qkv": e * (projected + rotated) / tp, "softmax": FP32 * shape.heads / tp, "context": e * query / tp}
    if shape.qk_norm and tp < shape.groups < shape.heads:
        found["qk_norm"] = e * query / tp  # queries of several groups are copied out of the projection's output
    if shape.output_gate:
        found["gate"] = 3 * e * query / tp  # the gate in the projection's output, its copy, and the gated output
    return found


def _latent_attention(latent: Latent, heads: int, parallel: Parallel, e: int) -> dict[str, float]:
    compressed = 2 * (latent.q_rank or 0) + 2 * latent.kv_rank + latent.rope_dim
    qkv = heads * (2 * latent.query_dim + latent.v_dim)
    return {
        "latents": e * compressed / parallel.sp,
        "latent_qkv": e * qkv / parallel.tp,
        "softmax": FP32 * heads / parallel.tp,
        "context": e * heads * latent.v_dim / parallel.tp,
    }


LINEAR_CHUNK = 64  # tokens between two states that the kernels of flash-linear-attention keep


def _linear_attention(linear: LinearAttention, tp: int, e: int) -> dict[str, float]:
    convolved = 2 * linear.keys + linear.values
    states = linear.value_heads * linear.key_dim * linear.value_dim / LINEAR_CHUNK
    return {
        "qkv": 2 * e * convolved / tp,  # before and after the convolution
        "softmax": e * states / tp,
        "gate": e * linear.values / tp,
        "context": 2 * e * linear.values / tp,
    }


def _mlp(shape: ModelShape, ffn: int, kept: Kept) -> float:
    """Bytes per token of the input of the activation function and of its output."""
    return kept.element * ffn * ((2 if shape.gated else 1) + 1 + _unfused(shape, kept))


def _unfused(shape: ModelShape, kept: Kept) -> int:
    """Without fusion a gated unit keeps its activated half and its shifted linear half too."""
    return 2 if shape.gated and not kept.fused_activation else 0


def _experts(shape: ModelShape, experts: Experts, parallel: Parallel, kept: Kept) -> dict[str, float]:
    """Bytes per token of a rank whose experts get their even share: ``top_k`` copies of every token."""
    e, copies = kept.element, experts.top_k * parallel.etp / parallel.sp
    width, unfused = experts.ffn / parallel.etp, _unfused(shape, kept)
    found = {
        "router": (5 * experts.number + 24 * experts.top_k) / parallel.sp,  # scores and mask; choices and weights
        "expert_inputs": copies * e * (experts.latent or shape.hidden),
        "expert_hidden": copies * e * width * (2 if shape.gated else 1),
        "expert_outputs": copies * e * width * (1 + unfused + (unfused > 0)),  # weighted by the router
    }
    if experts.shared:
        found["shared"] = _mlp(shape, experts.shared, kept) / parallel.tp
    return found
