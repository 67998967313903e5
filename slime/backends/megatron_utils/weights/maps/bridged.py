"""The weight map of a family that slime has no map for, from its bridge of the package mbridge.

The tensors' names are those of the bridge. How they become Megatron's parameters must be what one of our layouts does:
both are compared on small tensors, for one and for two tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.weights.layouts import Dims, GateUp, Layout, Shape, Vocabulary
from slime.backends.megatron_utils.weights.maps.parts import (
    DENSE,
    QK_NORM,
    QKV_BIAS,
    ROTARY_BUFFERS,
    expert_bias,
    routed_experts,
    router,
    shared_expert_gate,
    shared_experts,
)
from slime.backends.megatron_utils.weights.maps.rule import EXPERT, LAYER, Family, Rule, as_template
from slime.models import hf_fields

RULES = (
    *DENSE, QKV_BIAS, *QK_NORM, router(), expert_bias(), *routed_experts(), *shared_experts(), shared_expert_gate()
)  # fmt: skip
"""The parameters that are asked for; their tensors are those of other families."""
SMALL = {
    "hidden_size": 8, "intermediate_size": 12, "moe_intermediate_size": 12, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 16, "num_experts_per_tok": 2,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
}  # fmt: skip
DIMS = Dims(4, 2, 6, 16, 16, 4)
SHAPES: dict[str, Shape] = {
    "word_embeddings.weight": (16, 8), "output_layer.weight": (16, 8), "linear_qkv.weight": (48, 8),
    "linear_qkv.bias": (48,), "linear_proj.weight": (8, 24), "linear_fc1.weight": (24, 8), "linear_fc2.weight": (8, 12),
    "router.weight": (4, 8), "router.expert_bias": (4,), "q_layernorm.weight": (6,), "k_layernorm.weight": (6,),
    "gate_weight": (1, 8),
}  # fmt: skip
"""The whole parameters of such a model; norms have 8 numbers."""
_NOT_MAPPED = (NotImplementedError, KeyError, AssertionError, IndexError)


def bridge_of(config: dict[str, Any]) -> Any:
    """Return the bridge of ``config``, the content of a ``config.json``, for a single rank.

    Raises ValueError for a ``model_type`` without a class in transformers.
    """
    import_megatron()
    from mbridge.core.bridge import _MODEL_REGISTRY
    from mbridge.core.parallel_states import ParallelStates
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = config["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"transformers has no configuration of model_type {model_type}")
    completed = CONFIG_MAPPING[model_type].from_dict(dict(config))
    # mbridge reads these two as transformers 4 had them
    if getattr(completed, "head_dim", None) is None:
        completed.head_dim = completed.hidden_size // completed.num_attention_heads
    completed.rope_theta = hf_fields.rope_theta(completed.to_dict())
    return _MODEL_REGISTRY[model_type](completed, dtype=torch.float32, parallel_states=ParallelStates())


@cache
def bridged_family(model_type: str) -> Family:
    """Return the family that mbridge knows as ``model_type``.

    Raises ValueError when its bridge makes a parameter of the tensors in a way that is none of our layouts.
    """
    bridge = bridge_of({"model_type": model_type, **SMALL})
    rules = tuple(found for rule in RULES if (found := _bridged(bridge, rule)) is not None)
    return Family(model_type, (model_type,), rules, ROTARY_BUFFERS)


def _bridged(bridge: Any, rule: Rule) -> Rule | None:
    """Return ``rule`` with the names of the bridge; None when that does not have the parameter."""
    for parameter in rule.megatron:
        try:
            names = tuple(as_template(name).template for name in _hf_names(bridge, parameter, 0, 0))
            found = replace(rule, hf=names)
            regular = _hf_names(bridge, parameter, 3, 2) == found.hf_names(3, 2)
        except _NOT_MAPPED:
            continue
        numbered = all((LAYER in name) == (LAYER in parameter) for name in names)
        experts = all((EXPERT in name) == (EXPERT in parameter) for name in names)
        if not (regular and numbered and experts):
            raise ValueError(f"the bridge's tensors of {parameter} are not numbered as layers and experts: {names}")
        if not all(_is_the_same(bridge, parameter.format(layer=0, expert=0), found, ranks) for ranks in (1, 2)):
            raise ValueError(
                f"the bridge of {type(bridge).__name__} makes {parameter} of {', '.join(names)} in a way that is not "
                f"{type(rule.layout).__name__}: slime needs a map of this family"
            )
        return found
    return None


def _hf_names(bridge: Any, parameter: str, layer: int, expert: int) -> list[str]:
    return list(bridge._weight_name_mapping_mcore_to_hf(parameter.format(layer=layer, expert=expert)))


def _is_the_same(bridge: Any, parameter: str, rule: Rule, ranks: int) -> bool:
    """Return whether bridge and layout agree in both directions, for ``ranks`` tensor-parallel ranks."""
    sources = list(numbered_sources(rule.layout, SHAPES.get(_kind(parameter), (8,)), DIMS))
    if len(sources) != len(rule.hf):
        return False
    try:
        shards = [rule.layout.shard(sources, rank, ranks, DIMS) for rank in range(ranks)]
        parts, names, tensors = through_bridge(bridge, parameter, rule.layout, sources, shards)
    except (RuntimeError, ValueError, *_NOT_MAPPED):  # of tensors that the bridge expects in another form
        return False
    same = [torch.equal(a, b) for a, b in zip((*parts, *tensors), (*shards, *sources), strict=True)]
    return all(same) and names == rule.hf_names(0, 0)


def _kind(parameter: str) -> str:
    name = parameter.removesuffix("weight0")
    return ".".join((name + "weight" if name != parameter else name).rsplit(".", 2)[-2:]).removeprefix("shared_experts.")


def numbered_sources(layout: Layout, parameter: Shape, dims: Dims) -> Iterator[torch.Tensor]:
    """Yield tensors of which ``layout`` makes a whole parameter of that shape, no number in them twice."""
    first = 0
    for shape in layout.hf_shapes(parameter, 1, dims):
        count = torch.Size(shape).numel()
        yield torch.arange(first, first + count, dtype=torch.float32).reshape(shape)
        first += count


def through_bridge(
    bridge: Any, parameter: str, layout: Layout, sources: list[torch.Tensor], shards: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[str], list[torch.Tensor]]:
    """Return what the bridge makes of ``sources`` for the ranks, and the names and tensors that it makes of ``shards``.

    ``parameter`` has numbers in the place of ``{layer}`` and ``{expert}``.
    """
    from mbridge.core.parallel_states import ParallelStates

    ranks = len(shards)
    bridge.mpu = ParallelStates(tp_size=ranks, etp_size=ranks)
    like = torch.empty_like(shards[0])
    like.tensor_model_parallel = layout.sharded  # type: ignore[attr-defined]
    rows = isinstance(layout, Vocabulary | GateUp) or like.ndim == 1 or like.shape[1:] == sources[0].shape[1:]
    like.partition_dim = 0 if rows else 1  # type: ignore[attr-defined]
    whole = bridge._weight_to_mcore_format(parameter, sources)
    parts = list(bridge._weight_split_across_tp(parameter, whole, like, ranks))
    merged = shards[0] if not layout.sharded else bridge._weight_merge_across_tp(parameter, shards, like)
    names, tensors = bridge._weight_to_hf_format(parameter, merged)
    return parts, list(names), list(tensors)
