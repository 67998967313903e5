"""GLM-4.5, 4.6 and 4.7: biases on q, k and v, in the large ones norms on q and k; experts, and a shared one."""

from __future__ import annotations

from slime.backends.megatron_utils.weights.maps.dense import DENSE, QK_NORM, QKV_BIAS, ROTARY_BUFFERS
from slime.backends.megatron_utils.weights.maps.experts import expert_bias, routed_experts, router, shared_experts
from slime.backends.megatron_utils.weights.maps.mtp import in_extra_layers
from slime.backends.megatron_utils.weights.maps.rule import Family

RULES = (*DENSE, QKV_BIAS, *QK_NORM, router(), expert_bias(), *routed_experts(), *shared_experts())

FAMILY = Family("glm4_moe", ("glm4_moe",), RULES, ROTARY_BUFFERS, prediction=in_extra_layers(RULES))
