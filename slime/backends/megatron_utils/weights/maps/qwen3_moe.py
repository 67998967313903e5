"""Qwen3 with experts: the rules of dense Qwen3 (layers may be dense), a router and routed experts."""

from __future__ import annotations

from slime.backends.megatron_utils.weights.maps.dense import DENSE, QK_NORM, ROTARY_BUFFERS
from slime.backends.megatron_utils.weights.maps.experts import routed_experts, router
from slime.backends.megatron_utils.weights.maps.rule import Family

FAMILY = Family("qwen3_moe", ("qwen3_moe",), (*DENSE, *QK_NORM, router(), *routed_experts()), ROTARY_BUFFERS)
