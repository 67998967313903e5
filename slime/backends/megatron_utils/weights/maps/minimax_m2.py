"""MiniMax-M2: norms on q and k that span all heads, experts in every layer under Mixtral's names."""

from __future__ import annotations

from slime.backends.megatron_utils.weights.maps.dense import DENSE, QK_NORM, ROTARY_BUFFERS
from slime.backends.megatron_utils.weights.maps.experts import expert_bias, routed_experts, router
from slime.backends.megatron_utils.weights.maps.rule import Family

_MOE = "block_sparse_moe."
RULES = (
    *DENSE,
    *QK_NORM,
    router(f"{_MOE}gate.weight"),
    expert_bias(f"{_MOE}e_score_correction_bias"),
    *routed_experts(f"{_MOE}experts.{{expert}}.", ("w1", "w3", "w2")),
)

FAMILY = Family("minimax_m2", ("minimax_m2",), RULES, ROTARY_BUFFERS)
