"""Qwen3-Next: gated delta nets and gated attention; experts, and a shared one behind a gate."""

from __future__ import annotations

from slime.backends.megatron_utils.weights.maps.dense import ROTARY_BUFFERS
from slime.backends.megatron_utils.weights.maps.hybrid import GATED_ATTENTION, delta_net, one_predicting_layer
from slime.backends.megatron_utils.weights.maps.qwen2_moe import EXPERTS
from slime.backends.megatron_utils.weights.maps.rule import Family

RULES = (*GATED_ATTENTION, *delta_net("in_proj_qkvz", "in_proj_ba"), *EXPERTS)

FAMILY = Family("qwen3_next", ("qwen3_next",), RULES, ROTARY_BUFFERS, prediction=one_predicting_layer(RULES))
