"""Qwen2 and Qwen2.5: the dense rules, and biases on q, k and v."""

from __future__ import annotations

from slime.backends.megatron_utils.weights.maps.dense import DENSE, QKV_BIAS, ROTARY_BUFFERS
from slime.backends.megatron_utils.weights.maps.rule import Family

FAMILY = Family("qwen2", ("qwen2",), (*DENSE, QKV_BIAS), ROTARY_BUFFERS)
