"""Qwen3.5, its language model: gated delta nets and gated attention; dense, or experts and a shared one.

A checkpoint of the language model alone has the names of other families. Published ones hold a vision-language model:
the language model below ``model.language_model``, with the experts of a layer stacked.
"""

from __future__ import annotations

from slime.backends.megatron_utils.weights.layouts import RowParallel
from slime.backends.megatron_utils.weights.maps.families import GATED_SHARED_EXPERT
from slime.backends.megatron_utils.weights.maps.glm4 import FusedGateUp
from slime.backends.megatron_utils.weights.maps.parts import (
    GATED_ATTENTION,
    ROTARY_BUFFERS,
    delta_net,
    one_mtp_layer,
    router,
    shared_expert_gate,
    shared_experts,
    stacked_experts,
)
from slime.backends.megatron_utils.weights.maps.rule import Family, Rule
from slime.backends.megatron_utils.weights.maps.vision import BELOW_MODEL, QWEN3_TOWER, below_language_model

DENSE = (*GATED_ATTENTION, *delta_net("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
STACKED_EXPERTS = (
    router(),
    *stacked_experts(FusedGateUp(), RowParallel()),
    *shared_experts("mlp.shared_expert."),
    shared_expert_gate(),
)


def _family(name: str, rules: tuple[Rule, ...], tower: tuple[Rule, ...] = ()) -> Family:
    return Family(name, (name,), rules, ROTARY_BUFFERS, BELOW_MODEL, one_mtp_layer(rules), tower)


FAMILIES = (
    _family("qwen3_5_text", DENSE),
    _family("qwen3_5_moe_text", (*DENSE, *GATED_SHARED_EXPERT)),
    _family("qwen3_5", below_language_model(DENSE), QWEN3_TOWER),
    _family("qwen3_5_moe", below_language_model((*DENSE, *STACKED_EXPERTS)), QWEN3_TOWER),
)
