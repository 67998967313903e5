"""The part of a sequence that each context-parallel rank holds; cutting and rejoining of per-token data.

Zig-zag layout (Ring attention's load balancing, as Megatron expects it for packed sequences): a sequence of ``L``
tokens is padded to ``2 * cp_size`` chunks of ``c = ceil(L / (2 * cp_size))``; rank ``r`` holds chunks ``r`` and
``2 * cp_size - 1 - r``, one after the other. With ``cp_size == 1`` the sequence stays as it is, without padding.

Per-token *response* data (log-probs, advantages, masks) is indexed by response token. The value of response token ``j``
comes from the logits at position ``prompt_length - 1 + j``; a rank holds it iff it holds that position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Range = tuple[int, int]
"""Half-open interval ``[start, end)``; ``(0, 0)`` where it is empty."""


def zigzag_chunk_size(total_length: int, cp_size: int) -> int:
    """Return the chunk length ``ceil(total_length / (2 * cp_size))``."""
    return -(-total_length // (2 * cp_size))


def zigzag_local_length(total_length: int, cp_size: int) -> int:
    """Return how many positions (padding included) each rank holds of a sequence of ``total_length`` tokens."""
    return total_length if cp_size == 1 else 2 * zigzag_chunk_size(total_length, cp_size)


def zigzag_chunks(total_length: int, *, cp_rank: int, cp_size: int) -> tuple[Range, Range]:
    """Return the two ranges of positions that ``cp_rank`` holds; they may reach past ``total_length`` (padding)."""
    chunk = zigzag_chunk_size(total_length, cp_size)
    mirror = 2 * cp_size - 1 - cp_rank
    return (cp_rank * chunk, (cp_rank + 1) * chunk), (mirror * chunk, (mirror + 1) * chunk)


def logits_and_tokens_offsets(
    total_length: int, response_length: int, *, cp_rank: int, cp_size: int
) -> tuple[int, tuple[Range, Range], tuple[Range, Range], tuple[Range, Range]]:
    """Return ``(chunk_size, chunks, logits_ranges, token_ranges)`` of one sample on one rank.

    ``logits_ranges`` are the sequence positions held by the rank whose logits predict a response token and
    ``token_ranges`` the positions of the predicted tokens (one further right). Empty ranges are ``(0, 0)``.
    """
    chunks = zigzag_chunks(total_length, cp_rank=cp_rank, cp_size=cp_size)
    prompt_length = total_length - response_length
    logits = [_intersect(chunk, (prompt_length - 1, total_length - 1)) for chunk in chunks]
    tokens = [(start + 1, end + 1) if end > start else (0, 0) for start, end in logits]
    return zigzag_chunk_size(total_length, cp_size), chunks, (logits[0], logits[1]), (tokens[0], tokens[1])


def response_ranges(total_length: int, response_length: int, *, cp_rank: int, cp_size: int) -> tuple[Range, ...]:
    """Return the ranges of response tokens (0 = first response token) whose values ``cp_rank`` holds, in order."""
    if cp_size == 1:
        return ((0, response_length),)
    _, _, logits, _ = logits_and_tokens_offsets(total_length, response_length, cp_rank=cp_rank, cp_size=cp_size)
    first = total_length - response_length - 1
    return tuple((start - first, end - first) for start, end in logits if end > start)


def slice_with_cp(tokens: Tensor, pad_value: float = 0, *, cp_rank: int, cp_size: int) -> Tensor:
    """Cut the rank's positions out of a whole sequence [L, ...]; the padding holds ``pad_value``.

    Returns [2 * chunk, ...], or the tensor itself with ``cp_size == 1``.
    """
    if cp_size == 1:
        return tokens
    length = tokens.size(0)
    padding = 2 * cp_size * zigzag_chunk_size(length, cp_size) - length
    padded = F.pad(tokens, [0, 0] * (tokens.dim() - 1) + [0, padding], value=pad_value)
    first, second = zigzag_chunks(length, cp_rank=cp_rank, cp_size=cp_size)
    return torch.cat([padded[first[0] : first[1]], padded[second[0] : second[1]]])


def slice_response(values: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Cut ``ranges`` out of per-response-token values [response_length, ...] and join them."""
    if len(ranges) == 1 and ranges[0] == (0, values.size(0)):
        return values
    return torch.cat([values[start:end] for start, end in ranges]) if ranges else values[:0]


def slice_response_with_cp(
    values: Tensor, total_length: int, response_length: int, *, cp_rank: int, cp_size: int
) -> Tensor:
    """Return the rank's part [n_local, ...] of per-response-token values [response_length, ...].

    Raises ValueError when ``values`` does not have ``response_length`` entries.
    """
    if values.size(0) != response_length:
        raise ValueError(
            f"expected one value per response token ({response_length}), got {values.size(0)}; "
            "the tensor may already be cut for this context-parallel rank"
        )
    return slice_response(values, response_ranges(total_length, response_length, cp_rank=cp_rank, cp_size=cp_size))


def gather_responses(
    local_values: Sequence[Tensor],
    response_lengths: Sequence[int],
    ranges: Sequence[Sequence[Range]],
    *,
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    """Rejoin per-response-token values of several samples over a context-parallel group, in one collective.

    ``local_values[i]`` [n_local_i, ...] holds ``ranges[i]`` of sample ``i``; returns tensors [response_length_i, ...],
    equal on all ranks. Differentiable: the gradient of a local value is the sum of the gradients from all ranks,
    because every rank may have used it. ``group`` None means that this process holds everything.

    Raises ValueError when a local tensor does not cover its ranges.
    """
    for i, (local, parts) in enumerate(zip(local_values, ranges, strict=True)):
        covered = sum(end - start for start, end in parts)
        if local.size(0) != covered:
            raise ValueError(f"sample {i}: expected {covered} values for the ranges {list(parts)}, got {local.size(0)}")
    if group is None:
        return list(local_values)
    # Positions of the local values in the concatenation of all whole responses
    pieces, base = [torch.empty(0, dtype=torch.long)], 0
    for length, parts in zip(response_lengths, ranges, strict=True):
        pieces += [torch.arange(base + start, base + end) for start, end in parts]
        base += length
    index = torch.cat(pieces).to(local_values[0].device)
    full = _ScatterAndSum.apply(torch.cat(list(local_values)), index, sum(response_lengths), group)
    return list(full.split(list(response_lengths)))


def gather_responses_with_cp(
    local_values: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    *,
    cp_rank: int,
    cp_size: int,
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    """``gather_responses`` for the zig-zag layout: whole responses from every rank's parts, in one collective."""
    ranges = [
        response_ranges(total, response, cp_rank=cp_rank, cp_size=cp_size)
        for total, response in zip(total_lengths, response_lengths, strict=True)
    ]
    return gather_responses(local_values, response_lengths, ranges, group=group if cp_size > 1 else None)


def _intersect(a: Range, b: Range) -> Range:
    start, end = max(a[0], b[0]), min(a[1], b[1])
    return (start, end) if start < end else (0, 0)


class _ScatterAndSum(torch.autograd.Function):
    """Write local values into a zero vector and sum it over the group; backward sums gradients and reads them back."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, local: Tensor, index: Tensor, size: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(index)
        ctx.group = group  # type: ignore[attr-defined]
        full = local.new_zeros(size, *local.shape[1:]).index_copy_(0, index, local.detach())
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors  # type: ignore[attr-defined]
        grad = grad.clone()  # dist.all_reduce works in place, and grad belongs to autograd
        dist.all_reduce(grad, group=ctx.group)  # type: ignore[attr-defined]
        return grad[index], None, None, None
