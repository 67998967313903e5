"""Attention spelled out: float64, one full mask, no packing tricks. The reference of the attention tests."""

from __future__ import annotations

import math

import torch


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``[t, n, dv]`` for packed ``q [t, n, d]``, ``k [t, g, d]``, ``v [t, g, dv]``; ``g`` divides ``n``.

    ``window``: a causal query sees the last so many keys, its own included. ``sinks [n]``: one more score per head.
    """
    q, k, v = q.double(), k.double(), v.double()
    heads = q.size(1) // k.size(1)
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = segment[:, None] == segment[None, :]
    if causal:
        position = torch.arange(q.size(0))
        seen &= position[:, None] >= position[None, :]
        if window is not None:
            seen &= position[:, None] < position[None, :] + window
    out = []
    for head in range(q.size(1)):
        scores = q[:, head] @ k[:, head // heads].T / math.sqrt(q.size(-1))
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].expand(len(scores), 1)], 1)
        out.append(scores.softmax(-1)[:, : len(v)] @ v[:, head // heads])
    return torch.stack(out, dim=1)


def zigzag(x: torch.Tensor, lengths: list[int], cp_rank: int, cp_size: int) -> torch.Tensor:
    """Return the rows of packed ``x`` that ``cp_rank`` holds: chunks r and 2cp-1-r of each sequence."""
    parts = []
    for sequence in x.split(lengths):
        chunks = sequence.chunk(2 * cp_size)
        parts += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]]
    return torch.cat(parts)


def undo_zigzag_pack(parts: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """Return packed rows in their true order from all ranks' parts, by inverting :func:`zigzag` on row numbers."""
    cp_size, total = len(parts), sum(lengths)
    rows = torch.cat([zigzag(torch.arange(total), lengths, rank, cp_size) for rank in range(cp_size)])
    out = torch.empty(total, *parts[0].shape[1:], dtype=parts[0].dtype)
    out[rows] = torch.cat(parts)
    return out
