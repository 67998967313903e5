"""Samples -> one packed micro-batch (THD) for this tensor- and context-parallel rank.

Sequences are laid end to end in one row; attention sees them apart through ``cu_seqlens``. Padding at the end of the
row is a segment of its own, so no sample attends to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.batching.context_parallel import Range, slice_with_cp, zigzag_chunks, zigzag_local_length

Layout = Literal["zigzag", "contiguous"]


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
    loss_mask: float32 [1, T_local] aligned with the logits: 1 where the logits at that position predict a trained
        response token. None when no masks were given.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    total_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    loss_mask: Tensor | None = None

    @cached_property
    def response_ranges(self) -> tuple[tuple[Range, ...], ...]:
        """Per sample, the ranges of response tokens (0 = first) whose logits lie on this rank, in order."""
        return tuple(
            tuple((position - first, position - first + length) for _, position, length in pieces)
            for first, pieces in self._response_pieces
        )

    @cached_property
    def response_sizes(self) -> list[int]:
        """Per sample, how many response tokens have their logits on this rank; sums to ``len(logits_index)``."""
        return [sum(length for _, _, length in pieces) for _, pieces in self._response_pieces]

    @cached_property
    def logits_index(self) -> Tensor:
        """int64 [R_local]: row positions whose logits predict response tokens, sample after sample."""
        pieces = [torch.arange(row, row + length) for _, ps in self._response_pieces for row, _, length in ps]
        return torch.cat(pieces or [torch.empty(0, dtype=torch.long)]).to(self.tokens.device)

    def split_responses(self, values: Tensor) -> list[Tensor]:
        """Split values [R_local, ...] in the order of ``logits_index`` into one view per sample."""
        return list(values.split(self.response_sizes))

    @property
    def _response_pieces(self) -> list[tuple[int, list[tuple[int, int, int]]]]:
        """Per sample: first predicting position, and (row, position, length) pieces of predicting positions here."""
        result = []
        for total, response, spans in zip(self.total_lengths, self.response_lengths, self.spans, strict=True):
            first, last = total - response - 1, total - 1
            pieces = []
            for span in spans:
                start, end = max(span.position, first), min(span.position + span.length, last)
                if start < end:
                    pieces.append((span.start + start - span.position, start, end - start))
            result.append((first, pieces))
        return result


def pack(
    tokens: Sequence[Tensor],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor] | None = None,
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    tp_size: int = 1,
    pad_multiplier: int = 128,
    layout: Layout = "zigzag",
) -> PackedMicroBatch:
    """Pack whole sequences into the row of one rank.

    tokens: integer tensors [total_length_i], prompt + response, one device. loss_masks: [response_length_i] each.
    The local row is padded to a multiple of ``tp_size * pad_multiplier`` (sequence parallelism splits it evenly; few
    distinct shapes spare recompilations). ``layout`` says how a context-parallel group shares the row: ``zigzag`` cuts
    every sequence into two chunks per rank, ``contiguous`` pads the whole row and gives each rank one slice of it.

    Raises ValueError for an empty batch, and for a sample whose response leaves no prompt token to predict it from.
    """
    _check(tokens, response_lengths, loss_masks)
    alignment = tp_size * pad_multiplier
    if layout == "contiguous":
        row, masks, spans, segments = _contiguous(tokens, response_lengths, loss_masks, cp_rank, cp_size, alignment)
    else:
        row, masks, spans, segments = _zigzag(tokens, response_lengths, loss_masks, cp_rank, cp_size, alignment)
    cu_seqlens = torch.tensor([0, *segments], dtype=torch.int64).cumsum(0).to(row.device, torch.int32)
    return PackedMicroBatch(
        tokens=row.long().unsqueeze(0),
        cu_seqlens=cu_seqlens,
        max_seqlen=max(segments),
        total_lengths=tuple(t.size(0) for t in tokens),
        response_lengths=tuple(response_lengths),
        spans=spans,
        loss_mask=None if masks is None else masks.unsqueeze(0),
    )


_Row = tuple[Tensor, Tensor | None, tuple[tuple[Span, ...], ...], list[int]]


def _zigzag(
    tokens: Sequence[Tensor],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor] | None,
    cp_rank: int,
    cp_size: int,
    alignment: int,
) -> _Row:
    if cp_size > 1:
        alignment = math.lcm(alignment, 2)  # the padding segment is cut into two chunks per rank as well
    locals_ = [slice_with_cp(t, cp_rank=cp_rank, cp_size=cp_size) for t in tokens]
    sizes = [local.size(0) for local in locals_]
    padding = -sum(sizes) % alignment
    row = F.pad(torch.cat(locals_), (0, padding))
    masks = None
    if loss_masks is not None:
        aligned = _aligned_masks(tokens, response_lengths, loss_masks)
        masks = F.pad(torch.cat([slice_with_cp(m, cp_rank=cp_rank, cp_size=cp_size) for m in aligned]), (0, padding))
    spans, start = [], 0
    for t, size in zip(tokens, sizes, strict=True):
        spans.append(_zigzag_spans(t.size(0), start, cp_rank, cp_size))
        start += size
    segments = [size * cp_size for size in [*sizes, padding] if size]
    return row, masks, tuple(spans), segments


def _zigzag_spans(total_length: int, row_start: int, cp_rank: int, cp_size: int) -> tuple[Span, ...]:
    if cp_size == 1:
        return (Span(row_start, 0, total_length),)
    half = zigzag_local_length(total_length, cp_size) // 2
    chunks = zigzag_chunks(total_length, cp_rank=cp_rank, cp_size=cp_size)
    spans = [Span(row_start + i * half, start, min(end, total_length) - start) for i, (start, end) in enumerate(chunks)]
    return tuple(span for span in spans if span.length > 0)


def _contiguous(
    tokens: Sequence[Tensor],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor] | None,
    cp_rank: int,
    cp_size: int,
    alignment: int,
) -> _Row:
    sizes = [t.size(0) for t in tokens]
    padding = -sum(sizes) % (alignment * cp_size)
    local_size = (sum(sizes) + padding) // cp_size
    low, high = cp_rank * local_size, (cp_rank + 1) * local_size
    row = F.pad(torch.cat(list(tokens)), (0, padding))[low:high]
    masks = None
    if loss_masks is not None:
        masks = F.pad(torch.cat(_aligned_masks(tokens, response_lengths, loss_masks)), (0, padding))[low:high]
    spans, start = [], 0
    for size in sizes:
        first, last = max(start, low), min(start + size, high)
        spans.append((Span(first - low, first - start, last - first),) if first < last else ())
        start += size
    return row, masks, tuple(spans), [size for size in [*sizes, padding] if size]


def _aligned_masks(
    tokens: Sequence[Tensor], response_lengths: Sequence[int], loss_masks: Sequence[Tensor]
) -> list[Tensor]:
    """Shift each response mask onto the positions whose logits predict the response, zeros elsewhere: [total]."""
    aligned = []
    for t, response, mask in zip(tokens, response_lengths, loss_masks, strict=True):
        whole = torch.zeros(t.size(0), dtype=torch.float32, device=t.device)
        if response:
            whole[t.size(0) - response - 1 : -1] = mask
        aligned.append(whole)
    return aligned


def _check(tokens: Sequence[Tensor], response_lengths: Sequence[int], loss_masks: Sequence[Tensor] | None) -> None:
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
        if loss_masks is not None and loss_masks[i].size(0) != response:
            raise ValueError(
                f"sample {i} of the micro-batch: loss mask has {loss_masks[i].size(0)} entries, response {response}"
            )
