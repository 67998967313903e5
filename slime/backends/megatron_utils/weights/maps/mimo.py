"""MiMo-7B: Qwen2's layers, and MTP layers under ``model.mtp_layers``."""

from __future__ import annotations

from slime.backends.megatron_utils.weights.maps.dense import DENSE, QKV_BIAS, ROTARY_BUFFERS
from slime.backends.megatron_utils.weights.maps.mtp import HiddenFirst, mtp_rules
from slime.backends.megatron_utils.weights.maps.rule import Family, Prediction

NAMES = ("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight", "final_layernorm.weight")
RULES = (*DENSE, QKV_BIAS)
MTP = Prediction(mtp_rules(RULES, NAMES, "model.mtp_layers.{layer}.", HiddenFirst()), r"^model\.mtp_layers\.")

FAMILY = Family("mimo", ("mimo",), RULES, ROTARY_BUFFERS, prediction=MTP)
