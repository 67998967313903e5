"""Models with gated delta nets (linear attention) in some layers and gated attention in the others."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slime.arguments.args import Args
from slime_plugins.models.hf_attention import HuggingfaceAttention

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig


class LinearAttention(HuggingfaceAttention):
    """The gated delta net ``delta_net`` of transformers (a class of ``hf_config`` and layer index).

    Its recurrence runs along each sequence of the pack on its own: no state passes from one sample to the next.
    """

    def __init__(
        self, args: Args, config: TransformerConfig, layer_number: int, *, delta_net: type, **kwargs: Any
    ) -> None:
        super().__init__(args, config, layer_number, **kwargs)
        self.linear_attn = delta_net(self.hf_config, self.hf_layer_idx).to(config.params_dtype)

    def hf_forward(self, hidden_states: Tensor, packed_seq_params: PackedSeqParams) -> Tensor:
        """See the base class."""
        from slime.backends.megatron_utils.model.attention import sequence_lengths

        sequences = hidden_states.split(sequence_lengths(packed_seq_params), dim=1)
        return torch.cat([self.linear_attn(sequence) for sequence in sequences if sequence.size(1)], dim=1)


def hybrid_block_spec(args: Args, config: TransformerConfig, vp_stage: int | None, delta_net: type) -> Any:
    """Return the block spec of this pipeline stage: linear attention where the checkpoint's ``layer_types`` say so.

    Raises ValueError when the checkpoint has another number of layers than the flags.
    """
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
    from transformers import AutoConfig

    from slime.backends.megatron_utils.model.layer_specs import decoder_block_spec

    trust = {"trust_remote_code": args.trust_remote_code}
    hf_config = AutoConfig.from_pretrained(args.hf_checkpoint, **trust).get_text_config()
    kinds = hf_config.layer_types
    if len(kinds) != config.num_layers:
        raise ValueError(f"{args.hf_checkpoint} has {len(kinds)} layers, --num-layers is {config.num_layers}")
    config.hetereogenous_dist_checkpoint = True  # Megatron's word: layers are not stacked in checkpoints
    block = decoder_block_spec(args, config, vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    for i, layer in enumerate(block.layer_specs):
        if kinds[first + i] == "linear_attention":
            layer = block.layer_specs[i] = copy.deepcopy(layer)
            # TransformerEngine's attention has the norm before it inside; this one has not.
            layer.submodules.input_layernorm = block.layer_norm
            layer.submodules.self_attention = ModuleSpec(LinearAttention, params={"args": args, "delta_net": delta_net})
    return block
