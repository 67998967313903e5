"""DeepSeek-V3 and its relatives (Kimi K2, Moonlight, GLM-4.7-Flash): latent attention; experts, and shared ones.

DeepSeek-V3.2 and GLM-5 have an indexer besides, in some layers or all.
"""

from __future__ import annotations

from slime.backends.megatron_utils.weights.layouts import ColumnParallel, Replicated
from slime.backends.megatron_utils.weights.maps.parts import (
    DENSE,
    ROTARY_BUFFERS,
    expert_bias,
    in_extra_layers,
    layer_rule,
    routed_experts,
    router,
    shared_experts,
)
from slime.backends.megatron_utils.weights.maps.rule import Family

LATENT_ATTENTION = (
    layer_rule("self_attention.linear_q_proj.weight", ("self_attn.q_proj.weight",), ColumnParallel()),
    layer_rule("self_attention.linear_q_down_proj.weight", ("self_attn.q_a_proj.weight",), Replicated()),
    layer_rule("self_attention.linear_q_up_proj.weight", ("self_attn.q_b_proj.weight",), ColumnParallel()),
    layer_rule("self_attention.linear_kv_down_proj.weight", ("self_attn.kv_a_proj_with_mqa.weight",), Replicated()),
    layer_rule("self_attention.linear_kv_up_proj.weight", ("self_attn.kv_b_proj.weight",), ColumnParallel()),
    layer_rule(
        ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
        ("self_attn.q_a_layernorm.weight",),
        Replicated(),
    ),
    layer_rule(
        ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
        ("self_attn.kv_a_layernorm.weight",),
        Replicated(),
    ),
)
RULES = (
    *(rule for rule in DENSE if not rule.megatron[0].endswith("linear_qkv.weight")),
    *LATENT_ATTENTION,
    router(),
    expert_bias(),
    *routed_experts(),
    *shared_experts(),
)

FAMILY = Family(
    "deepseek_v3",
    ("deepseek_v3", "kimi_k2", "glm4_moe_lite"),
    RULES,
    ROTARY_BUFFERS,
    mtp=in_extra_layers(RULES),
)

INDEXER = tuple(
    layer_rule(f"self_attention.indexer.{name}", (f"self_attn.indexer.{name}",), Replicated())
    for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
)
SPARSE = Family(
    "deepseek_v32",
    ("deepseek_v32", "glm_moe_dsa"),
    (*RULES, *INDEXER),
    ROTARY_BUFFERS,
    mtp=in_extra_layers((*RULES, *INDEXER)),
)
