"""MiMo-7B: Qwen2's layers, and layers that predict further tokens under ``model.mtp_layers``."""

from __future__ import annotations

from slime.backends.megatron_utils.weights.maps.dense import DENSE, QKV_BIAS, ROTARY_BUFFERS
from slime.backends.megatron_utils.weights.maps.rule import Family

MTP_LAYERS = r"^model\.mtp_layers\."

FAMILY = Family("mimo", ("mimo",), (*DENSE, QKV_BIAS), ROTARY_BUFFERS, carried=(MTP_LAYERS,))
