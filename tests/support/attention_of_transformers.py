"""Attention as the page of customization has it: the delta net of transformers, each sequence alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from slime.backends.megatron_utils.model.attention import sequence_lengths
from slime_plugins.models.hf_attention import HuggingfaceAttention
from slime_plugins.models.linear_attention import LinearAttention
from slime_plugins.models.qwen3_5 import get_qwen3_5_spec


class WholeDeltaNet(HuggingfaceAttention):
    """The parameters have the names of slime's own module."""

    def __init__(self, args: Any, config: Any, layer_number: int, **kwargs: Any) -> None:
        super().__init__(args, config, layer_number, **kwargs)
        self.linear_attn = Qwen3_5GatedDeltaNet(self.hf_config, self.hf_layer_idx).to(config.params_dtype)

    def hf_forward(self, hidden_states: torch.Tensor, packed_seq_params: Any) -> torch.Tensor:
        """See the base class."""
        sequences = hidden_states.split(sequence_lengths(packed_seq_params), dim=1)
        return torch.cat([self.linear_attn(sequence) for sequence in sequences if sequence.size(1)], dim=1)


def get_spec(args: Any, config: Any, vp_stage: int | None) -> Any:
    """Return Qwen3.5's layers with it."""
    block = get_qwen3_5_spec(args, config, vp_stage)
    for i, layer in enumerate(block.layer_specs):
        if layer.submodules.self_attention.module is LinearAttention:
            block.layer_specs[i] = copy.deepcopy(layer)
            block.layer_specs[i].submodules.self_attention = ModuleSpec(WholeDeltaNet, params={"args": args})
    return block
