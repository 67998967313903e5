"""Sparse latent attention (DeepSeek-V3.2, GLM-5): an indexer chooses the keys of a query. After ``import_megatron()``.

The scores of all pairs of a long sequence are never held at once: query rows are taken in chunks, of which the chosen
positions stay, ``index_topk`` numbers per query. Keys and values are gathered over the context-parallel ranks, of which
each has a zig-zag part of every sequence, as in the dense form. Queries that see at most ``index_topk`` keys choose all
of them, so there this is the dense form, by the same code.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from slime.arguments.args import Args
from slime.backends.megatron_utils.model.attention import (
    DuplicatedLinear,
    LatentSelfAttention,
    Segment,
    TorchCoreAttention,
    attend,
    sequence_lengths,
)
from slime.backends.megatron_utils.model.layer_specs import decoder_block_spec
from slime.models import hf_fields
from slime.utils import accelerator

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import MLATransformerConfig

SCORES = 2**26
"""Scores, over all heads of the indexer, that are computed at once: 256 query rows of 32 heads and 8192 keys."""
K_NORM_EPSILON = 1e-6  # whatever the model's own is


@dataclass(frozen=True)
class Sparse:
    """Sparse attention of a ``config.json``; ``full[i]``: layer i has an indexer, else it takes the last one's.

    ``interleaved``: neighboring numbers are rotated together, not those half of the rotated part apart.
    """

    heads: int
    dim: int
    topk: int
    interleaved: bool
    full: tuple[bool, ...]

    def source(self, layer_number: int) -> int:
        """Return the number, counted from 1, of the layer whose selection the layer ``layer_number`` uses."""
        return max(i for i in range(1, layer_number + 1) if self.full[i - 1])


def sparse_of(args: Args) -> Sparse:
    """Return the sparse attention of ``--hf-checkpoint``. Raises ValueError if its config has none."""
    path = Path(args.hf_checkpoint) / "config.json"
    config = hf_fields.text_part(json.loads(path.read_text()))
    full = hf_fields.selecting_layers(config)
    missing = [key for key in ("index_n_heads", "index_head_dim", "index_topk") if not config.get(key)]
    if missing or len(full) != args.num_layers:
        raise ValueError(
            f"{path} describes no sparse attention of --num-layers {args.num_layers}: it has {len(full)} layers"
            + (f" and no {', '.join(missing)}" if missing else "")
        )
    interleaved = hf_fields.interleaves_indexer(config)
    return Sparse(config["index_n_heads"], config["index_head_dim"], config["index_topk"], interleaved, tuple(full))


class Indexer(torch.nn.Module):
    """Scores of keys, ``sum over heads h of w_h relu(q_h k)``. Whole on every rank, and without gradient.

    Keys and head weights come from the hidden states, queries from the latent of attention's queries.
    """

    def __init__(self, config: MLATransformerConfig, sparse: Sparse) -> None:
        super().__init__()
        assert config.q_lora_rank is not None
        self.sparse, self.rotated = sparse, config.qk_pos_emb_head_dim
        device = "cpu" if config.use_cpu_initialization else accelerator.current_device()
        self.wq_b = DuplicatedLinear(config, config.q_lora_rank, sparse.heads * sparse.dim)
        self.wk = DuplicatedLinear(config, config.hidden_size, sparse.dim)
        self.k_norm = torch.nn.LayerNorm(sparse.dim, K_NORM_EPSILON, dtype=config.params_dtype, device=device)
        self.weights_proj = DuplicatedLinear(config, config.hidden_size, sparse.heads)
        self.requires_grad_(False)

    def forward(self, hidden: Tensor, latent: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [t, heads, dim], keys [t, 1, dim] and head weights [t, heads, 1], in fp32.

        ``hidden`` is [t, hidden size], ``latent`` [t, rank], ``cos`` and ``sin`` [t, rotated].
        """
        norm, sparse = self.k_norm, self.sparse
        q = self.wq_b(latent)[0].float().unflatten(-1, (sparse.heads, sparse.dim))
        k = self.wk(hidden)[0].float()
        k = F.layer_norm(k, norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps).unsqueeze(1)
        w = F.linear(hidden.float(), self.weights_proj.weight.float())
        w = w * (sparse.heads * sparse.dim) ** -0.5
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin), w.unsqueeze(-1)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first numbers of each head. Their order afterwards is that of both queries and keys."""
        part, rest = x.split([self.rotated, x.size(-1) - self.rotated], -1)
        first, second = (part[..., 0::2], part[..., 1::2]) if self.sparse.interleaved else part.chunk(2, -1)
        part, turned = torch.cat([first, second], -1), torch.cat([-second, first], -1)
        return torch.cat([part * cos.unsqueeze(1) + turned * sin.unsqueeze(1), rest], -1)


def selected(query: Tensor, key: Tensor, weight: Tensor, topk: int) -> Tensor:
    """Return the positions [b, q, topk] of the best keys of each query, int32, those it may not see last.

    ``query [b, q, heads, d]``, ``key [b, k, d]``, ``weight [b, q, heads]``; the queries are the last ones of the keys.
    """
    scores = torch.einsum("bqhd,bkd->bqhk", query, key).relu_()
    scores = torch.einsum("bqhk,bqh->bqk", scores, weight)
    scores.masked_fill_(_unseen(scores), -torch.inf)
    return scores.topk(topk, -1).indices.to(torch.int32)


def _unseen(scores: Tensor) -> Tensor:
    queries, keys = scores.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu_(keys - queries + 1)


def attend_selected(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float, rate: float) -> Tensor:
    """Return attention [b, q, n, dv] of queries to the keys at ``positions`` [b, q, topk], among those that they see.

    Shapes as in :class:`Segment`; ``rate``: of dropout.
    """
    chosen = torch.zeros(*positions.shape[:2], key.size(1), dtype=torch.bool, device=key.device)
    chosen.scatter_(-1, positions.long(), True)
    chosen &= ~_unseen(chosen)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=chosen.unsqueeze(1), scale=scale, dropout_p=rate)
    return out.transpose(1, 2)


def row_chunks(segment: Segment, sparse: Sparse) -> Iterator[Segment]:
    """Yield the queries of ``segment`` in chunks with the keys that the last one sees: first all that see few keys.

    Long sequences are taken one after the other: chunks of several would not follow each other as their tokens do.
    """
    sequences, queries, keys = *segment.q.shape[:2], segment.k.size(1)
    if keys > sparse.topk and sequences > 1:
        for parts in zip(*(x.split(1) for x in (segment.q, segment.k, segment.v)), strict=True):
            yield from row_chunks(Segment(*parts), sparse)
        return
    before = keys - queries
    rows = max(1, SCORES // (sparse.heads * keys))
    start = 0
    while start < queries:
        stop = start + rows if before + start >= sparse.topk else max(sparse.topk - before, start)
        stop = min(stop, queries)
        seen = before + stop
        yield Segment(segment.q[:, start:stop], segment.k[:, :seen], segment.v[:, :seen])
        start = stop


class SparseCoreAttention(TorchCoreAttention):
    """Attention to the keys that the indexer of the layer ``source`` has chosen for this micro-batch."""

    def __init__(self, config: MLATransformerConfig, layer_number: int, *args: Any, sparse: Sparse, **kw: Any) -> None:
        super().__init__(config, layer_number, *args, **kw)
        if self.window is not None:
            raise ValueError("--window-size: the indexer of sparse attention chooses what a query sees; leave it out")
        self.sparse, self.source = sparse, sparse.source(layer_number)

    def chunks(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> list[Segment]:
        """Return what this rank computes, in the order of its tokens."""
        segments = self._segments(query, key, value, lengths, causal=True)
        return [chunk for segment in segments for chunk in row_chunks(segment, self.sparse)]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return the context [t, 1, n*dv]; arguments as in the base class, of packed sequences."""
        lengths = packed_lengths(packed_seq_params)
        if max(lengths) <= self.sparse.topk:
            return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)
        self._is_causal(attn_mask_type or self.attn_mask_type, attention_bias)
        choices = selections(packed_seq_params)[self.source]
        rate = self.dropout_p if self.training else 0.0
        parts = []
        with self._dropout_generator(rate):
            for chunk, positions in zip(self.chunks(query, key, value, lengths), choices, strict=True):
                if positions is None:
                    parts.append(attend([chunk], causal=True, scale=self.scale, dropout_p=rate))
                    continue
                # The mask of a chunk is made again in the backward pass: all of them are T^2 numbers.
                inputs = (chunk.q, chunk.k, chunk.v, positions, self.scale, rate)
                parts.append(checkpoint(attend_selected, *inputs, use_reentrant=False).flatten(0, 1))
        out = torch.cat(parts)
        return out.reshape(out.size(0), 1, -1)


def packed_lengths(packed_seq_params: PackedSeqParams | None) -> list[int]:
    """Return the lengths of the packed sequences. Raises ValueError when there are none."""
    if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
        raise ValueError("sparse attention takes packed sequences only")
    return sequence_lengths(packed_seq_params)


def selections(packed_seq_params: PackedSeqParams | None) -> dict[int, list[Tensor | None]]:
    """Return what the layers have chosen for this micro-batch: number of the layer -> positions for every chunk.

    By number, because recomputation runs through the layers backwards: the latest selection would be the wrong one.
    """
    known: dict[int, list[Tensor | None]] | None = getattr(packed_seq_params, "_selections", None)
    if known is None:
        known = {}
        setattr(packed_seq_params, "_selections", known)  # noqa: B010  (a dataclass of megatron's)
    return known


class SparseLatentSelfAttention(LatentSelfAttention):
    """Latent attention whose indexer chooses keys before them; a layer without one uses an earlier layer's choice."""

    core_attention: SparseCoreAttention

    def __init__(self, config: MLATransformerConfig, *args: Any, sparse: Sparse, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.indexer = Indexer(config, sparse) if sparse.full[self.layer_number - 1] else None
        self.is_source = not all(sparse.full[self.layer_number : self.layer_number + 1])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what megatron's does. What no other layer needs is forgotten in passes without a graph.

        The recomputation of a whole layer chooses again; that of its core attention does not, and is no such pass.
        """
        output = super().forward(*args, **kwargs)
        if not (torch.is_grad_enabled() or self.is_source):
            selections(kwargs.get("packed_seq_params")).pop(self.layer_number, None)
        return output

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return what megatron's does; on the way the keys are chosen."""
        tensors = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, **kwargs
        )
        if self.indexer is not None and max(packed_lengths(packed_seq_params)) > self.indexer.sparse.topk:
            selections(packed_seq_params)[self.layer_number] = self._select(
                hidden_states.detach(), tensors[3].detach(), packed_seq_params
            )
        return tensors

    @torch.no_grad()
    def _select(self, hidden: Tensor, latent: Tensor, packed_seq_params: PackedSeqParams | None) -> list[Tensor | None]:
        assert self.indexer is not None
        lengths, topk = packed_lengths(packed_seq_params), self.indexer.sparse.topk
        if self.config.sequence_parallel:
            hidden, latent = (
                gather_from_sequence_parallel_region(x.contiguous(), group=self.tp_group) for x in (hidden, latent)
            )
        hidden, latent = (x.reshape(-1, x.size(-1)) for x in (hidden, latent))
        rotation = getattr(packed_seq_params, "_indexer_rotation", None)
        if rotation is None:  # the same in all layers
            rotation = self._rotation(lengths, hidden.device)
            setattr(packed_seq_params, "_indexer_rotation", rotation)  # noqa: B010  (a dataclass of megatron's)
        q, k, w = self.indexer(hidden, latent, *rotation)
        # Head weights go with their queries; there are no values.
        chunks = self.core_attention.chunks(torch.cat([q, w], -1), k, k[..., :0], lengths)
        return [
            None if c.k.size(1) <= topk else selected(c.q[..., :-1], c.k.squeeze(2), c.q[..., -1], topk) for c in chunks
        ]

    def _rotation(self, lengths: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [t, rotated] for the positions of this rank's tokens."""
        angles, factor = self.rotary_pos_emb(max(lengths), packed_seq=True), 1.0
        if isinstance(angles, tuple):  # YaRN
            angles, factor = angles
        rank, size = self.core_attention.cp_group.rank(), self.core_attention.cp_group.size()
        table = angles[:, 0, 0].float()
        positions = torch.cat([local_positions(length, rank, size) for length in lengths]).to(device)
        angles = table[positions]
        return angles.cos() * factor, angles.sin() * factor


def local_positions(length: int, rank: int, size: int) -> Tensor:
    """Return the positions of a sequence of ``length`` tokens that context-parallel rank ``rank`` of ``size`` has."""
    positions = torch.arange(length)
    if size == 1:
        return positions
    chunks = positions.chunk(2 * size) if length else (positions,) * 2 * size
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def sparse_block_spec(args: Args, config: MLATransformerConfig, vp_stage: int | None) -> Any:
    """Return the block spec of this pipeline stage: built-in layers with sparse attention.

    Raises ValueError if the stage begins with a layer that has no indexer.
    """
    sparse = sparse_of(args)
    block = decoder_block_spec(args, config, vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    if block.layer_specs and not sparse.full[first]:
        raise ValueError(f"a pipeline stage begins with layer {first}, which has no indexer")
    if not all(sparse.full):
        config.hetereogenous_dist_checkpoint = True  # Megatron's word: layers are not stacked in checkpoints
    for i, shared in enumerate(block.layer_specs):
        layer = block.layer_specs[i] = copy.deepcopy(shared)
        attention = layer.submodules.self_attention
        attention.module = SparseLatentSelfAttention
        attention.params = {**attention.params, "sparse": sparse}
        parts = attention.submodules
        parts.core_attention = ModuleSpec(SparseCoreAttention, params={"sparse": sparse})
        if parts.q_layernorm is IdentityOp:  # the indexer reads what TransformerEngine normalizes in its projection
            from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

            parts.q_layernorm, parts.linear_q_up_proj = block.layer_norm, TEColumnParallelLinear
    return block
