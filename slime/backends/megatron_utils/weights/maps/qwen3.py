"""Qwen3 dense: the dense rules, and norms on q and k."""

from __future__ import annotations

from slime.backends.megatron_utils.weights.maps.dense import DENSE, QK_NORM, ROTARY_BUFFERS
from slime.backends.megatron_utils.weights.maps.rule import Family

FAMILY = Family("qwen3", ("qwen3",), (*DENSE, *QK_NORM), ROTARY_BUFFERS)
