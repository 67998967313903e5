"""Run an attention module of transformers inside Megatron's layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slime.arguments.args import Args

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


class HuggingfaceAttention(torch.nn.Module, ABC):
    """Base of attention modules written for transformers; a subclass implements ``hf_forward``.

    For a ``ModuleSpec(module=SubClass, params={"args": args})`` in place of a layer's self-attention. The subclass
    makes its modules in ``__init__`` from ``self.hf_config`` (of a vision-language model the language model's) and
    ``self.hf_layer_idx`` (counted over the whole model from 0).

    Every tensor- and context-parallel rank computes the module on the whole pack: sequence-parallel and
    context-parallel parts are gathered before ``hf_forward`` and cut afterwards. So any module works under any layout
    with parameters that all these ranks hold whole; its memory and time are not divided.
    """

    def __init__(
        self,
        args: Args,
        config: TransformerConfig,
        layer_number: int,
        cp_comm_type: str = "p2p",
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        from transformers import AutoConfig

        self.args = args
        self.config = config
        self.layer_number = layer_number
        self.hf_layer_idx = layer_number - 1
        trust = {"trust_remote_code": args.trust_remote_code}
        self.hf_config = AutoConfig.from_pretrained(args.hf_checkpoint, **trust).get_text_config()

    @abstractmethod
    def hf_forward(self, hidden_states: Tensor, packed_seq_params: PackedSeqParams) -> Tensor:
        """Return the module's output ``[1, tokens, hidden]`` for ``hidden_states`` of that shape.

        The sequences of the pack lie one after the other, ``packed_seq_params.cu_seqlens_q`` says where each begins;
        none may see another.
        """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Return ``(output [t, 1, hidden], None)`` for this rank's part ``[t, 1, hidden]`` of the pack."""
        if packed_seq_params is None:
            raise ValueError(f"{type(self).__name__} takes packed sequences only, and got none")
        gathered = self._gather(hidden_states, packed_seq_params)
        output = self.hf_forward(gathered.transpose(0, 1), packed_seq_params).transpose(0, 1)
        return self._scatter(output, packed_seq_params), None

    def _gather(self, hidden_states: Tensor, packed_seq_params: PackedSeqParams) -> Tensor:
        from megatron.core import parallel_state as mpu
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        from slime.backends.megatron_utils.model.attention import undo_zigzag

        if self.config.sequence_parallel:
            # Every rank computes the same from here on, so the backward pass only takes its part of the gradient.
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        group = mpu.get_context_parallel_group()
        if group.size() == 1:
            return hidden_states
        # Each rank's loss is that of its own tokens: gradients are summed over the ranks.
        gathered = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True, group=group)
        lengths = self._local_lengths(packed_seq_params, group.size())
        ranks = [part.split(lengths) for part in gathered.chunk(group.size())]
        return torch.cat([undo_zigzag(parts) for parts in zip(*ranks, strict=True)])

    def _scatter(self, output: Tensor, packed_seq_params: PackedSeqParams) -> Tensor:
        from megatron.core import parallel_state as mpu
        from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region

        group = mpu.get_context_parallel_group()
        if group.size() > 1:
            lengths = [n * group.size() for n in self._local_lengths(packed_seq_params, group.size())]
            rank, parts = group.rank(), [sequence.chunk(2 * group.size()) for sequence in output.split(lengths)]
            output = torch.cat(
                [half for chunks in parts if chunks[0].size(0) for half in (chunks[rank], chunks[-1 - rank])]
            )
        return scatter_to_sequence_parallel_region(output) if self.config.sequence_parallel else output.contiguous()

    @staticmethod
    def _local_lengths(packed_seq_params: PackedSeqParams, cp_size: int) -> list[int]:
        from slime.backends.megatron_utils.model.attention import sequence_lengths

        return [length // cp_size for length in sequence_lengths(packed_seq_params)]
