"""GPTModel with MTP layers. Import after ``import_megatron()``.

megatron-core's own multi-token prediction needs labels and returns a loss, normalizes by the tokens of a micro-batch,
and sends gradients into the whole model. Here the model returns logits as ever; the layers run only where a training
step asks for them, and learn alone: hidden states, embedding and output layer are detached, so that the policy's
gradients are what they are without these layers. Module and parameter names are megatron's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock, MultiTokenPredictionLayer
from torch import Tensor

from slime.algorithms.log_probs import log_probs_and_entropy
from slime.arguments.args import Args
from slime.backends.megatron_utils.model.mtp_loss import Depth, MTPTargets, needs_shared_embedding
from slime.backends.megatron_utils.state.parallel import unwrap

if TYPE_CHECKING:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

ATTENTION_INPUTS = (
    *("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params"),
    "sequence_len_offset",
)
"""Arguments of ``GPTModel._postprocess`` that megatron's layers get beside the hidden states."""


class MTPLayer(MultiTokenPredictionLayer):
    """Megatron's layer, which is given the embeddings of the tokens to see instead of tokens to roll."""

    def forward(self, hidden_states: Tensor, embeddings: Tensor, **attention: object) -> Tensor:
        """Return the hidden states, normalized, for ``hidden_states`` and ``embeddings``, all [t, 1, hidden]."""

        def run(hidden_states: Tensor, embeddings: Tensor) -> Tensor:
            return self._proj_and_transformer_layer(hidden_states, embeddings, **attention)

        if self.config.recompute_granularity == "full" and self.training:
            return tensor_parallel.checkpoint(run, False, hidden_states, embeddings)
        return run(hidden_states, embeddings)


class GPTModelWithMTP(GPTModel):
    """The last stage of megatron's GPTModel, with layers of multi-token prediction ``mtp``.

    ``mtp_targets`` given to ``forward`` says what they are trained on; their losses are put into it. Without it
    they are not run.
    """

    def __init__(
        self, args: Args, config: TransformerConfig, mtp_spec: MultiTokenPredictionBlockSubmodules, **keywords: object
    ) -> None:
        super().__init__(config=config, **keywords)
        self.mtp = MultiTokenPredictionBlock(config, mtp_spec, vp_stage=keywords.get("vp_stage"))
        self.vocab = args.vocab_size
        self.log_probs_chunk_size = args.log_probs_chunk_size
        self.embedding_copy: Tensor | None = None
        self._further: MTPTargets | None = None

    def forward(self, *args: object, mtp_targets: MTPTargets | None = None, **keywords: object) -> Tensor:
        """Return the logits [1, t, vocab_local], as megatron's forward without labels."""
        self._further = mtp_targets
        try:
            return super().forward(*args, **keywords)
        finally:
            self._further = None

    def _postprocess(self, hidden_states: Tensor, **keywords: object) -> Tensor:
        if self._further is not None:
            attention = {name: keywords.get(name) for name in ATTENTION_INPUTS}
            losses = []
            # Recomputation takes its inputs for what may be differentiated: one of them has to ask for a gradient.
            hidden = hidden_states.detach().requires_grad_()
            for layer, depth in zip(self.mtp.layers, self._further.depths, strict=True):
                hidden = layer(hidden, self._embed(depth.input_ids), **attention)
                losses.append(self._loss(hidden, depth))
            self._further.losses = losses
        return super()._postprocess(hidden_states=hidden_states, **keywords)

    def _loss(self, hidden: Tensor, depth: Depth) -> Tensor:
        """Return the weighted sum of the cross-entropies of ``depth``, the same on all tensor-parallel ranks."""
        if self.config.sequence_parallel:
            whole = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            whole = copy_to_tensor_model_parallel_region(hidden)
        shared = self.share_embeddings_and_output_weights
        output_weight = self.shared_embedding_or_output_weight() if shared else self.output_layer.weight
        logits = F.linear(whole.squeeze(1)[depth.rows], output_weight.detach())
        log_probs, _ = log_probs_and_entropy(
            logits,
            depth.targets,
            tp_group=mpu.get_tensor_model_parallel_group(),
            vocab_size=self.vocab,
            chunk_size=self.log_probs_chunk_size,
            overwrite_logits=True,
        )
        return -(log_probs * depth.weights).sum()

    def _embedding_weight(self) -> Tensor:
        if self.pre_process:
            return self.embedding.word_embeddings.weight
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        if self.embedding_copy is None:
            raise RuntimeError(
                "the last pipeline stage has no copy of the embedding: train it in the body of borrow_embedding()"
            )
        return self.embedding_copy

    @torch.no_grad()
    def _embed(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [t, 1, hidden] of ``input_ids`` [1, t], this rank's part with sequence parallelism."""
        weight, group = self._embedding_weight(), mpu.get_tensor_model_parallel_group()
        local = input_ids - group.rank() * weight.size(0)
        elsewhere = (local < 0) | (local >= weight.size(0))
        found = F.embedding(local.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere.unsqueeze(-1), 0)
        if group.size() > 1:
            dist.all_reduce(found, group=group)
        embeddings = found.transpose(0, 1).contiguous()
        if self.config.fp32_residual_connection:
            embeddings = embeddings.float()
        return scatter_to_sequence_parallel_region(embeddings) if self.config.sequence_parallel else embeddings


def mtp_model_of(chunk: torch.nn.Module) -> GPTModelWithMTP | None:
    """Return the model inside ``chunk`` if it has layers of multi-token prediction."""
    model = unwrap(chunk)
    return model if isinstance(model, GPTModelWithMTP) else None


@contextmanager
def borrow_embedding(args: Args, model: Sequence[torch.nn.Module]) -> Iterator[None]:
    """In the body the last pipeline stage has a copy of the first one's embedding as it was at the beginning.

    Collective over first and last stage, and nothing unless :func:`needs_shared_embedding`. The layers only look up
    embeddings, so a copy without gradient and optimizer state is enough.
    """
    last = mtp_model_of(model[-1])
    if needs_shared_embedding(args) and mpu.is_rank_in_embedding_group():
        group = mpu.get_embedding_group()
        source = dist.get_process_group_ranks(group)[0]
        if last is not None:
            last.embedding_copy = torch.empty_like(last.output_layer.weight, requires_grad=False)  # of the same shape
            dist.broadcast(last.embedding_copy, src=source, group=group)
        else:
            first: Any = unwrap(model[0])
            dist.broadcast(first.embedding.word_embeddings.weight.detach(), src=source, group=group)
    try:
        yield
    finally:
        if last is not None:
            last.embedding_copy = None
