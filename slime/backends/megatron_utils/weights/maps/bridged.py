"""The weight map of a family that slime has no map for, from its bridge of the package mbridge.

The tensors' names are those of the bridge. How they become Megatron's parameters must be what one of our layouts does:
both are compared on small tensors, for one and for two tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.weights.layouts import Dims, RowParallel, Shape
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
    "tie_word_embeddings": False,
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
    kind = _MODEL_REGISTRY[model_type]
    # Some bridges change this dictionary of their class for a checkpoint with tied embeddings.
    kind = type(kind.__name__, (kind,), {"_DIRECT_MAPPING": dict(kind._DIRECT_MAPPING)})
    return kind(completed, dtype=torch.float32, parallel_states=ParallelStates())


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
    from mbridge.core.parallel_states import ParallelStates

    whole = next((shape for end, shape in SHAPES.items() if parameter.removesuffix("0").endswith(end)), (8,))
    shapes = rule.layout.hf_shapes(whole, 1, DIMS)
    if len(shapes) != len(rule.hf):
        return False
    sources = [torch.rand(shape) for shape in shapes]
    shards = [rule.layout.shard(sources, rank, ranks, DIMS) for rank in range(ranks)]
    like: Any = torch.empty_like(shards[0])  # has the marks of a parameter of Megatron's, which the bridge reads
    like.tensor_model_parallel = rule.layout.sharded
    like.partition_dim = int(isinstance(rule.layout, RowParallel))
    bridge.mpu = ParallelStates(tp_size=ranks, etp_size=ranks)
    try:
        made = bridge._weight_to_mcore_format(parameter, sources)
        parts = bridge._weight_split_across_tp(parameter, made, like, ranks)
        merged = bridge._weight_merge_across_tp(parameter, shards, like) if rule.layout.sharded else shards[0]
        tensors = bridge._weight_to_hf_format(parameter, merged)[1]
    except (RuntimeError, ValueError, *_NOT_MAPPED):  # of tensors that the bridge expects in another form
        return False
    seen, wanted = [*parts, *tensors], [*shards, *sources]
    return len(seen) == len(wanted) and all(map(torch.equal, seen, wanted))
