"""The families whose map is a few rules put together; longer ones have separate modules."""

from __future__ import annotations

from dataclasses import replace

from slime.backends.megatron_utils.weights.layouts import QueryKey, Replicated, RowParallel
from slime.backends.megatron_utils.weights.maps.glm4 import FusedGateUp
from slime.backends.megatron_utils.weights.maps.parts import (
    DENSE,
    GATED_ATTENTION,
    MEGATRON_LAYER,
    QK_NORM,
    QKV_BIAS,
    ROTARY_BUFFERS,
    HiddenFirst,
    delta_net,
    expert_bias,
    expert_names,
    in_extra_layers,
    layer_rule,
    mtp_rules,
    one_mtp_layer,
    routed_experts,
    router,
    shared_expert_gate,
    shared_experts,
)
from slime.backends.megatron_utils.weights.maps.rule import Family, MTPLayers, Rule

# Llama 2 and 3; Qwen2 and Qwen2.5 with biases on q, k and v; Qwen3 with norms on q and k.
LLAMA = Family("llama", ("llama",), DENSE, ROTARY_BUFFERS)
QWEN2 = Family("qwen2", ("qwen2",), (*DENSE, QKV_BIAS), ROTARY_BUFFERS)
QWEN3 = Family("qwen3", ("qwen3",), (*DENSE, *QK_NORM), ROTARY_BUFFERS)

# Qwen1.5 and Qwen2 with experts, and a shared one behind a gate. Layers of Qwen3 with experts may be dense.
GATED_SHARED_EXPERT = (router(), *routed_experts(), *shared_experts("mlp.shared_expert."), shared_expert_gate())
QWEN2_MOE = Family("qwen2_moe", ("qwen2_moe",), (*DENSE, QKV_BIAS, *GATED_SHARED_EXPERT), ROTARY_BUFFERS)
QWEN3_MOE = Family("qwen3_moe", ("qwen3_moe",), (*DENSE, *QK_NORM, router(), *routed_experts()), ROTARY_BUFFERS)

# Qwen3-Next: gated delta nets and gated attention.
_QWEN3_NEXT: tuple[Rule, ...] = (
    *GATED_ATTENTION,
    *delta_net("in_proj_qkvz", "in_proj_ba"),
    *GATED_SHARED_EXPERT,
)
QWEN3_NEXT = Family("qwen3_next", ("qwen3_next",), _QWEN3_NEXT, ROTARY_BUFFERS, mtp=one_mtp_layer(_QWEN3_NEXT))

# GLM-4.5, 4.6 and 4.7: biases on q, k and v, in the large ones norms on q and k; a shared expert.
_GLM4_MOE: tuple[Rule, ...] = (
    *(*DENSE, QKV_BIAS, *QK_NORM),
    *(router(), expert_bias(), *routed_experts(), *shared_experts()),
)
GLM4_MOE = Family("glm4_moe", ("glm4_moe",), _GLM4_MOE, ROTARY_BUFFERS, mtp=in_extra_layers(_GLM4_MOE))

# MiMo-7B: Qwen2's layers, and MTP layers under different names.
_MIMO_MTP = mtp_rules(
    QWEN2.rules,
    ("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight", "final_layernorm.weight"),
    "model.mtp_layers.{layer}.",
    HiddenFirst(),
)
MIMO = Family("mimo", ("mimo",), QWEN2.rules, ROTARY_BUFFERS, mtp=MTPLayers(_MIMO_MTP, r"^model\.mtp_layers\."))

# MiniMax-M2: norms on q and k that span all heads, experts in every layer under Mixtral's names.
_MIXTRAL = "block_sparse_moe."
MINIMAX_M2 = Family(
    "minimax_m2",
    ("minimax_m2",),
    (
        *DENSE,
        *QK_NORM,
        router(f"{_MIXTRAL}gate.weight"),
        expert_bias(f"{_MIXTRAL}e_score_correction_bias"),
        *routed_experts(f"{_MIXTRAL}experts.{{expert}}.", ("w1", "w3", "w2")),
    ),
    ROTARY_BUFFERS,
)

# Gemma 3: norms before and after attention and MLP.
_POST_NORMS = {
    "post_self_attn_layernorm.weight": "post_attention_layernorm.weight",
    "post_mlp_layernorm.weight": "post_feedforward_layernorm.weight",
}
_GEMMA3: tuple[Rule, ...] = (
    *(rule for rule in DENSE if "pre_mlp_layernorm" not in rule.megatron[0]),
    *QK_NORM,
    layer_rule(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("pre_feedforward_layernorm.weight",),
        Replicated(),
    ),
    *(layer_rule(megatron, (hf,), Replicated()) for megatron, hf in _POST_NORMS.items()),
)
GEMMA3 = Family("gemma3_text", ("gemma3_text",), _GEMMA3, ROTARY_BUFFERS)

# Gemma 4: layers whose values are their keys, and a number for each layer that is not trained. 26B-A4B has experts
# beside every MLP, which is Megatron's shared expert then, with norms of their own.
_SHARED = "self_attention.linear_qk."
_BESIDE = {
    **{f"mlp.{n}.weight": f"{n}.weight" for n in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2")},
    "mlp.pre_feedforward_layernorm_2.weight": "pre_feedforward_layernorm_2.weight",
    "mlp.router.weight": "router.proj.weight",
    "mlp.router.scale": "router.scale",
    "mlp.router.per_expert_scale": "router.per_expert_scale",
}
_MLP = {
    f"{MEGATRON_LAYER}{dense}.weight": f"{MEGATRON_LAYER}{beside}.weight"
    for dense, beside in {
        "mlp.linear_fc1": "mlp.shared_experts.linear_fc1",
        "mlp.linear_fc2": "mlp.shared_experts.linear_fc2",
        "pre_mlp_layernorm": "mlp.pre_feedforward_layernorm",
    }.items()
}


def _beside_experts(rule: Rule) -> Rule:
    """Return the rule with the parameter's name in layers with experts, if it is one of the MLP."""
    name = _MLP.get(rule.megatron[0])
    return replace(rule, megatron=(*rule.megatron, name), with_experts=name) if name else rule


_GEMMA4: tuple[Rule, ...] = (
    *(_beside_experts(rule) for rule in _GEMMA3 if "input_layernorm" not in rule.megatron[0]),
    *(layer_rule(megatron, (hf,), Replicated()) for megatron, hf in _BESIDE.items()),
    layer_rule(expert_names("linear_fc1"), ("experts.gate_up_proj",), FusedGateUp()),
    layer_rule(expert_names("linear_fc2"), ("experts.down_proj",), RowParallel()),
    layer_rule(
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight", f"{_SHARED}layer_norm_weight"),
        ("input_layernorm.weight",),
        Replicated(),
    ),
    layer_rule(f"{_SHARED}weight", ("self_attn.q_proj.weight", "self_attn.k_proj.weight"), QueryKey()),
    layer_rule("layer_scalar", ("layer_scalar",), Replicated()),
)
GEMMA4 = Family("gemma4_text", ("gemma4_text",), _GEMMA4, ROTARY_BUFFERS)
