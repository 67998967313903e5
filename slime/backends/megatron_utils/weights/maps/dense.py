"""Rules shared by the dense decoder families whose Hugging Face names are those of Llama."""

from __future__ import annotations

from slime.backends.megatron_utils.weights.layouts import (
    Columns,
    GateUp,
    Layout,
    QueryKeyValue,
    Replicated,
    Vocabulary,
)
from slime.backends.megatron_utils.weights.maps.rule import Rule

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
    layer_rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), Columns()),
    layer_rule(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("post_attention_layernorm.weight",),
        Replicated(),
    ),
    layer_rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GateUp()),
    layer_rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), Columns()),
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), Replicated()),
    Rule(("output_layer.weight",), (LM_HEAD,), Vocabulary()),
)
QKV_BIAS = layer_rule("self_attention.linear_qkv.bias", qkv_names("bias"), QueryKeyValue())
QK_NORM = (
    layer_rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), Replicated()),
    layer_rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), Replicated()),
)
ROTARY_BUFFERS = (r"\.rotary_emb\.inv_freq$",)
