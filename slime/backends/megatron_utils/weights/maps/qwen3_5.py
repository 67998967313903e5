"""Qwen3.5, its language model: gated delta nets and gated attention; dense, or experts and a shared one.

A checkpoint of the language model alone has the names of other families. Published ones hold a vision-language model:
the language model below ``model.language_model``, with the experts of a layer stacked.
"""

from __future__ import annotations

from dataclasses import replace

from slime.backends.megatron_utils.weights.layouts import RowParallel
from slime.backends.megatron_utils.weights.maps.families import GATED_SHARED_EXPERT
from slime.backends.megatron_utils.weights.maps.glm4 import FusedGateUp
from slime.backends.megatron_utils.weights.maps.parts import (
    GATED_ATTENTION,
    ROTARY_BUFFERS,
    delta_net,
    layer_rule,
    one_mtp_layer,
    router,
    shared_expert_gate,
    shared_experts,
)
from slime.backends.megatron_utils.weights.maps.rule import Family, Rule

VISION = (r"^model\.visual\.",)
DENSE = (*GATED_ATTENTION, *delta_net("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
_FC = "mlp.experts.linear_fc{}.weight{{expert}}", "mlp.experts.local_experts.{{expert}}.linear_fc{}.weight"
STACKED_EXPERTS = (
    router(),
    layer_rule(tuple(name.format(1) for name in _FC), ("mlp.experts.gate_up_proj",), FusedGateUp()),
    layer_rule(tuple(name.format(2) for name in _FC), ("mlp.experts.down_proj",), RowParallel()),
    *shared_experts("mlp.shared_expert."),
    shared_expert_gate(),
)


def _below_language_model(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    prefix = "model.language_model."
    return tuple(replace(rule, hf=tuple(name.replace("model.", prefix, 1) for name in rule.hf)) for rule in rules)


def _family(name: str, rules: tuple[Rule, ...]) -> Family:
    return Family(name, (name,), rules, ROTARY_BUFFERS, VISION, one_mtp_layer(rules))


FAMILIES = (
    _family("qwen3_5_text", DENSE),
    _family("qwen3_5_moe_text", (*DENSE, *GATED_SHARED_EXPERT)),
    _family("qwen3_5", _below_language_model(DENSE)),
    _family("qwen3_5_moe", _below_language_model((*DENSE, *STACKED_EXPERTS))),
)
