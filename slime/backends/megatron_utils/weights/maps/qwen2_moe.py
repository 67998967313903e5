"""Qwen1.5 and Qwen2 with experts: the rules of dense Qwen2, routed experts, and a shared one behind a gate."""

from __future__ import annotations

from slime.backends.megatron_utils.weights.maps.dense import DENSE, QKV_BIAS, ROTARY_BUFFERS
from slime.backends.megatron_utils.weights.maps.experts import (
    routed_experts,
    router,
    shared_expert_gate,
    shared_experts,
)
from slime.backends.megatron_utils.weights.maps.rule import Family

EXPERTS = (router(), *routed_experts(), *shared_experts("mlp.shared_expert."), shared_expert_gate())
FAMILY = Family("qwen2_moe", ("qwen2_moe",), (*DENSE, QKV_BIAS, *EXPERTS), ROTARY_BUFFERS)
