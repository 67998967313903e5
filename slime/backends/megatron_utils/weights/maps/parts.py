"""Rules that several families share: dense layers, experts, gated delta nets with gated attention, MTP layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slime.backends.megatron_utils.weights.layouts import (
    ColumnParallel,
    DeltaNetRows,
    Dims,
    GateUp,
    Layout,
    QueryKeyValue,
    Replicated,
    RowParallel,
    Shape,
    Vocabulary,
)
from slime.backends.megatron_utils.weights.maps.rule import MTPLayers, Rule

MEGATRON_LAYER = "decoder.layers.{layer}."


HF_LAYER = "model.layers.{layer}."


EMBEDDING = "model.embed_tokens.weight"


LM_HEAD = "lm_head.weight"


def layer_rule(megatron: str | tuple[str, ...], hf: tuple[str, ...], layout: Layout) -> Rule:
    """Return a rule with both sides given relative to the layer."""
    names = (megatron,) if isinstance(megatron, str) else megatron
    return Rule(tuple(MEGATRON_LAYER + name for name in names), tuple(HF_LAYER + name for name in hf), layout)


def qkv_names(kind: str) -> tuple[str, ...]:
    """Return the three projections' names for ``weight`` or ``bias``."""
    return tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv")


DENSE: tuple[Rule, ...] = (
    Rule(("embedding.word_embeddings.weight",), (EMBEDDING,), Vocabulary()),
    layer_rule(
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("input_layernorm.weight",),
        Replicated(),
    ),
    layer_rule("self_attention.linear_qkv.weight", qkv_names("weight"), QueryKeyValue()),
    layer_rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), RowParallel()),
    layer_rule(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("post_attention_layernorm.weight",),
        Replicated(),
    ),
    layer_rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GateUp()),
    layer_rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), RowParallel()),
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), Replicated()),
    Rule(("output_layer.weight",), (LM_HEAD,), Vocabulary()),
)


QKV_BIAS = layer_rule("self_attention.linear_qkv.bias", qkv_names("bias"), QueryKeyValue())


QK_NORM = (
    layer_rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), Replicated()),
    layer_rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), Replicated()),
)


ROTARY_BUFFERS = (r"\.rotary_emb\.inv_freq$",)


GATED = ("gate_proj", "up_proj", "down_proj")


def routed_experts(prefix: str = "mlp.experts.{expert}.", names: tuple[str, str, str] = GATED) -> tuple[Rule, ...]:
    """Return the rules of routed experts with the tensors ``prefix`` + one of ``names`` (gate, up, down) + ``.weight``.

    Megatron has a weight per expert in one grouped module, or a module per expert (``local_experts``).
    """
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return (
        layer_rule(expert_names("linear_fc1"), (gate, up), GateUp()),
        layer_rule(expert_names("linear_fc2"), (down,), RowParallel()),
    )


def expert_names(linear: str, kind: str = "weight") -> tuple[str, str]:
    """Return both names of a parameter of a routed expert; ``kind``: ``weight`` or ``bias``."""
    return f"mlp.experts.{linear}.{kind}{{expert}}", f"mlp.experts.local_experts.{{expert}}.{linear}.{kind}"


def stacked_experts(gate_up: Layout, down: Layout) -> tuple[Rule, ...]:
    """Return the rules of routed experts of which the checkpoint has one tensor each of all gates and ups, and downs.

    ``gate_up`` and ``down`` are the layouts of one expert.
    """
    return (
        layer_rule(expert_names("linear_fc1"), ("mlp.experts.gate_up_proj",), gate_up),
        layer_rule(expert_names("linear_fc2"), ("mlp.experts.down_proj",), down),
    )


def router(name: str = "mlp.gate.weight") -> Rule:
    """Return the rule of the router's weight, ``[experts, hidden]``."""
    return layer_rule("mlp.router.weight", (name,), Replicated())


def expert_bias(name: str = "mlp.gate.e_score_correction_bias") -> Rule:
    """Return the rule of the bias by which a router picks experts (it has no part in their weights)."""
    return layer_rule("mlp.router.expert_bias", (name,), Replicated())


def shared_experts(prefix: str = "mlp.shared_experts.", names: tuple[str, str, str] = GATED) -> tuple[Rule, ...]:
    """Return the rules of the experts that every token passes, which are one gated MLP on either side."""
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return (
        layer_rule("mlp.shared_experts.linear_fc1.weight", (gate, up), GateUp()),
        layer_rule("mlp.shared_experts.linear_fc2.weight", (down,), RowParallel()),
    )


def shared_expert_gate(name: str = "mlp.shared_expert_gate.weight") -> Rule:
    """Return the rule of the gate on the shared experts' output, ``[1, hidden]``."""
    return layer_rule("mlp.shared_experts.gate_weight", (name,), Replicated())


MEGATRON_MTP = "mtp.layers.{layer}."


PROJECTION = "eh_proj.weight"


DEEPSEEK = ("enorm.weight", "hnorm.weight", PROJECTION, "shared_head.norm.weight")


"""DeepSeek-V3's names, behind those of a layer that is numbered on after the last one."""


COPIES = ((f"{HF_LAYER}embed_tokens.weight", EMBEDDING), (f"{HF_LAYER}shared_head.head.weight", LM_HEAD))


"""The copies of embedding and output layer that DeepSeek-V3's checkpoints have in every such layer."""


def in_extra_layers(rules: Sequence[Rule]) -> MTPLayers:
    """Return the MTP layers of DeepSeek-V3's relatives, whose decoder layers have ``rules``."""
    return MTPLayers(mtp_rules(rules), copies=COPIES)


class HiddenFirst(ColumnParallel):
    """The projection of [hidden states, embeddings]; Megatron's is of [embeddings, hidden states]."""

    def shard(self, sources: Sequence[Any], tp_rank: int, tp_size: int, dims: Dims) -> torch.Tensor:
        return _exchanged(super().shard(sources, tp_rank, tp_size, dims))

    def unshard(self, shards: Sequence[torch.Tensor], dims: Dims) -> list[torch.Tensor]:
        return [_exchanged(full) for full in super().unshard(shards, dims)]


def _exchanged(projection: torch.Tensor) -> torch.Tensor:
    first, second = projection.chunk(2, dim=1)
    return torch.cat([second, first], dim=1)


def mtp_rules(
    rules: Sequence[Rule],
    names: tuple[str, str, str, str] = DEEPSEEK,
    layer: str = HF_LAYER,
    projection: Layout | None = None,
) -> tuple[Rule, ...]:
    """Return the rules of layers whose decoder layer has the weights of ``rules``, its tensors behind ``layer``.

    ``names``: of the embeddings' norm, the hidden states' norm, the projection, and the norm at the end. They go
    behind ``layer``, but for whole names (``mtp.``) of a family that has one such layer.
    """
    kinds = ("enorm.weight", "hnorm.weight", PROJECTION, "final_layernorm.weight")
    layouts = (Replicated(), Replicated(), projection or ColumnParallel(), Replicated())
    own = tuple(
        Rule((MEGATRON_MTP + kind,), (name if name.startswith("mtp.") else layer + name,), layout)
        for kind, name, layout in zip(kinds, names, layouts, strict=True)
    )
    return own + tuple(_of_decoder_layer(rule, layer) for rule in rules if rule.megatron[0].startswith(MEGATRON_LAYER))


def _of_decoder_layer(rule: Rule, layer: str) -> Rule:
    prefix = f"{MEGATRON_MTP}transformer_layer."
    megatron = tuple(name.replace(MEGATRON_LAYER, prefix, 1) for name in rule.megatron)
    return Rule(megatron, tuple(layer + name.partition("layers.{layer}.")[2] for name in rule.hf), rule.layout)


class GatedQueryKeyValue(QueryKeyValue):
    """As ``QueryKeyValue``, with a gate on attention's output next to every query.

    Hugging Face has them in ``q_proj``, per head ``d`` rows of the query above ``d`` rows of the gate; Megatron has per
    group the queries of all its heads, then their gates, then key and value.
    """

    def hf_shapes(self, local: Shape, tp_size: int, dims: Dims) -> list[Shape]:
        q, k, v = super().hf_shapes(local, tp_size, dims)
        return [(2 * q[0], *q[1:]), k, v]

    def _interleave(self, qkv: Sequence[torch.Tensor], dims: Dims) -> torch.Tensor:
        q, k, v = qkv
        heads = q.reshape(-1, dims.heads_per_group, 2, dims.kv_channels, *q.shape[1:])
        return super()._interleave([heads.transpose(1, 2).reshape(q.shape), k, v], dims)

    def unshard(self, shards: Sequence[torch.Tensor], dims: Dims) -> list[torch.Tensor]:
        full = torch.cat(list(shards))
        groups = full.reshape(dims.num_query_groups, -1, *full.shape[1:])
        d = dims.kv_channels
        q, k, v = groups.split([2 * dims.heads_per_group * d, d, d], dim=1)
        heads = q.reshape(-1, 2, dims.heads_per_group, d, *q.shape[2:]).transpose(1, 2)
        return [heads.reshape(-1, *q.shape[2:]), *(x.flatten(0, 1).contiguous() for x in (k, v))]


_QKV = "self_attention.linear_qkv.weight"


GATED_ATTENTION: tuple[Rule, ...] = (
    *(rule for rule in DENSE if not rule.megatron[0].endswith(_QKV)),
    layer_rule(_QKV, qkv_names("weight"), GatedQueryKeyValue()),
    *QK_NORM,
)


def one_mtp_layer(rules: Sequence[Rule]) -> MTPLayers:
    """Return the one MTP layer for decoder layers with ``rules``; it has full attention."""
    names = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight", "mtp.norm.weight")
    own = [rule for rule in rules if ".linear_attn." not in rule.megatron[0]]
    return MTPLayers(mtp_rules(own, names, "mtp.layers.{layer}."), r"^mtp\.")


def delta_net(*projections: str) -> tuple[Rule, ...]:
    """Return the rules of a gated delta net with these input projections.

    Rows of ``in_proj_qkv`` are those of all queries, keys and values; others have the heads one after the other.
    """
    layouts = {
        **dict.fromkeys(("A_log", "dt_bias"), ColumnParallel()),
        "conv1d.weight": DeltaNetRows(),
        "norm.weight": Replicated(),
        "out_proj.weight": RowParallel(),
        **{f"{name}.weight": DeltaNetRows() if name == "in_proj_qkv" else ColumnParallel() for name in projections},
    }
    return tuple(
        layer_rule(f"self_attention.linear_attn.{name}", (f"linear_attn.{name}",), layout)
        for name, layout in layouts.items()
    )
