"""The flags of a mixture of experts: which layers have them, how large they are, how tokens are routed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime.arguments.models import hf_fields
from slime.arguments.models.model_flag import ModelFlag

Config = dict[str, Any]

# How experts are computed, not which: the same for every model.
_COMPUTATION: tuple[tuple[str, Any], ...] = (
    ("--moe-grouped-gemm", True),
    ("--moe-permute-fusion", True),
    ("--moe-token-dispatcher-type", "alltoall"),
)
_ROUTER_COMPUTATION: tuple[tuple[str, Any], ...] = (("--moe-router-dtype", "fp32"), ("--moe-aux-loss-coeff", 0))


def expert_flags(config: Config, family: Config | None) -> Iterator[ModelFlag]:
    """Yield the flags of the experts and of their router; of a dense model only that there are none."""
    found = hf_fields.experts(config)
    if found is None:
        if family is not None:
            yield ModelFlag("experts", "--num-experts", None)
        return
    key, count = found
    yield ModelFlag("experts", "--num-experts", count, key)
    yield ModelFlag("experts", "--moe-router-topk", config.get("num_experts_per_tok"), "num_experts_per_tok")
    size = hf_fields.expert_size(config)
    if size is not None:
        yield ModelFlag("experts", "--moe-ffn-hidden-size", size[1], size[0])
    shared_key, shared = hf_fields.shared_size(config)
    option = "--moe-shared-expert-intermediate-size"
    yield ModelFlag("experts", option, shared, shared_key, written=shared > 0)
    if family is None:
        return
    gated = bool(config.get("shared_expert_intermediate_size"))  # Qwen's shared expert has a gate, DeepSeek's none
    yield ModelFlag("experts", "--moe-shared-expert-gate", gated)
    layers = hf_fields.expert_layers(config)
    if layers is not None:
        yield ModelFlag("experts", "--moe-layer-freq", layers, _layers_key(config))
    for option, value in _COMPUTATION:
        yield ModelFlag("experts", option, value, checked=False)
    if "router" in family:
        yield from _router_flags(config, family)


def _layers_key(config: Config) -> str:
    keys = ("mlp_layer_types", "first_k_dense_replace", "decoder_sparse_step")
    return next((f"the pattern of {key}" for key in keys if config.get(key) is not None), "the pattern of its layers")


def _router_flags(config: Config, family: Config) -> Iterator[ModelFlag]:
    sigmoid = family["router"] == "sigmoid"
    yield ModelFlag("router", "--moe-router-score-function", family["router"])
    yield ModelFlag("router", "--moe-router-enable-expert-bias", sigmoid)
    # With softmax, weights that are not normalized again are those of a softmax over all experts.
    normalized = config.get("norm_topk_prob") is not False
    yield ModelFlag(
        group="router",
        option="--moe-router-pre-softmax",
        value=sigmoid or not normalized,
        key="norm_topk_prob" if "norm_topk_prob" in config else "",
        stated=str(normalized).lower(),
        checked=not sigmoid,
    )
    if isinstance(config.get("n_group"), int):
        # A single group limits nothing; the router of DeepSeek-V3 and its relatives is written with it all the same.
        written = config["n_group"] > 1 or config.get("model_type") in ("deepseek_v3", "kimi_k2")
        yield ModelFlag("router", "--moe-router-num-groups", config["n_group"], "n_group", written=written)
        yield ModelFlag("router", "--moe-router-group-topk", config.get("topk_group"), "topk_group", written=written)
    scale = config.get("routed_scaling_factor")
    if scale is not None:
        option = "--moe-router-topk-scaling-factor"
        yield ModelFlag("router", option, scale, "routed_scaling_factor", written=scale != 1)
    for option, value in _ROUTER_COMPUTATION:
        yield ModelFlag("router", option, value, checked=False)
