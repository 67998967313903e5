"""Samples -> one packed micro-batch (THD) for this tensor- and context-parallel rank.

Sequences are laid end to end in one row; attention sees them apart through ``cu_seqlens``. Padding at the end of the
row is a separate segment, so no sample attends to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.batching.context_parallel import slice_with_cp, zigzag_chunks, zigzag_local_length
from slime.batching.ragged_tensor import flat


@dataclass(frozen=True)
class Span:
    """Row positions ``[start, start + length)`` hold sequence positions ``[position, position + length)``."""

    start: int
    position: int
    length: int


@dataclass(frozen=True)
class PackedMicroBatch:
    """One micro-batch as one rank sees it.

    tokens: int64 [1, T_local], padding is token 0.
    cu_seqlens: int32 [segments + 1] on the tokens' device, boundaries of the *global* padded row (all context-parallel
        ranks together), the padding segment included; what Megatron's ``PackedSeqParams`` wants.
    max_seqlen: longest segment, in global tokens.
    total_lengths, response_lengths: per sample, without padding.
    spans: per sample, where its real tokens lie in this rank's row, in sequence order.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    total_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]


def pack(
    tokens: Sequence[Tensor],
    response_lengths: Sequence[int],
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    tp_size: int = 1,
    pad_multiplier: int = 128,
) -> PackedMicroBatch:
    """Pack whole sequences into the row of one rank.

    tokens: integer tensors [total_length_i], prompt + response, one device; of a column the row is a part, which is
    only padded, where no context-parallel group cuts it. The local row is padded to a multiple of
    ``tp_size * pad_multiplier`` (sequence parallelism splits it evenly; few distinct shapes save recompilations). A
    context-parallel group cuts every sequence into two chunks per rank (zigzag), which balances causal attention.

    Raises ValueError for an empty batch, and for a sample whose response leaves no prompt token to predict it from.
    """
    _check(tokens, response_lengths)
    alignment = tp_size * pad_multiplier
    if cp_size > 1:
        alignment = math.lcm(alignment, 2)  # the padding segment is cut into two chunks per rank as well
    parts = tokens if cp_size == 1 else [slice_with_cp(t, cp_rank=cp_rank, cp_size=cp_size) for t in tokens]
    sizes = [part.size(0) for part in parts]
    padding = -sum(sizes) % alignment
    row = F.pad(flat(parts), (0, padding))
    spans, start = [], 0
    for t, size in zip(tokens, sizes, strict=True):
        spans.append(_zigzag_spans(t.size(0), start, cp_rank, cp_size))
        start += size
    segments = [size * cp_size for size in [*sizes, padding] if size]
    return PackedMicroBatch(
        tokens=row.long().unsqueeze(0),
        cu_seqlens=torch.tensor([0, *segments], dtype=torch.int64).cumsum(0).to(row.device, torch.int32),
        max_seqlen=max(segments),
        total_lengths=tuple(t.size(0) for t in tokens),
        response_lengths=tuple(response_lengths),
        spans=tuple(spans),
    )


def _zigzag_spans(total_length: int, row_start: int, cp_rank: int, cp_size: int) -> tuple[Span, ...]:
    if cp_size == 1:
        return (Span(row_start, 0, total_length),)
    half = zigzag_local_length(total_length, cp_size) // 2
    chunks = zigzag_chunks(total_length, cp_rank=cp_rank, cp_size=cp_size)
    spans = [Span(row_start + i * half, start, min(end, total_length) - start) for i, (start, end) in enumerate(chunks)]
    return tuple(span for span in spans if span.length > 0)


def _check(tokens: Sequence[Tensor], response_lengths: Sequence[int]) -> None:
    if not tokens or len(tokens) != len(response_lengths):
        raise ValueError(
            f"a micro-batch needs at least one sample and one response length each, "
            f"got {len(tokens)} samples and {len(response_lengths)} lengths"
        )
    for i, (t, response) in enumerate(zip(tokens, response_lengths, strict=True)):
        if not 0 <= response < t.size(0):
            raise ValueError(
                f"sample {i} of the micro-batch has {t.size(0)} tokens and response length {response}: expected at "
                "least one prompt token, since a token without predecessor has no log-prob"
            )
