"""Llama 2 and 3: the dense rules as they are."""

from __future__ import annotations

from slime.backends.megatron_utils.weights.maps.dense import DENSE, ROTARY_BUFFERS
from slime.backends.megatron_utils.weights.maps.rule import Family

FAMILY = Family("llama", ("llama",), DENSE, ROTARY_BUFFERS)
