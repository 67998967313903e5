"""Discounted sums of the future, in blocks instead of token by token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def discounted_suffix_sums(values: Tensor, decay: float, chunk_size: int = 128) -> Tensor:
    """Return ``S_t = sum_k decay^k * values_{t+k}`` along the last axis; shape and dtype of ``values`` [..., T].

    Without a loop over T: a product with a triangular matrix of powers sums within chunks, and what is carried from
    chunk to chunk is the same kind of sum, T / chunk_size long. Terms are added from the far end on, as by the
    recursion ``S_t = values_t + decay * S_{t+1}``: rounding errors of the nearest, largest ones come last.
    """
    if values.size(-1) == 0:
        return values.clone()
    return _discounted_prefix_sums(values.flip(-1), decay, max(2, chunk_size)).flip(-1)


def _discounted_prefix_sums(values: Tensor, decay: float, chunk_size: int) -> Tensor:
    """Return ``S_t = sum_k decay^k * values_{t-k}`` along the last axis."""
    length = values.size(-1)
    chunk = min(chunk_size, length)
    steps = torch.arange(chunk, device=values.device, dtype=torch.float64)
    distance = steps - steps.unsqueeze(1)
    # powers[i, j] = decay^(j - i) for j >= i: column j sums what is before position j within the chunk
    powers = torch.where(distance >= 0, decay ** distance.clamp_min(0), 0).to(values.dtype)
    chunks = F.pad(values, (0, -length % chunk)) if length % chunk else values
    sums = chunks.unflatten(-1, (-1, chunk)) @ powers
    if length > chunk:
        # one value per chunk: double precision costs nothing there, and what is carried has the most terms
        carried = _discounted_prefix_sums(sums[..., :-1, -1].double(), decay**chunk, chunk_size).to(values.dtype)
        sums[..., 1:, :].addcmul_((decay ** (steps + 1)).to(values.dtype), carried.unsqueeze(-1))
    return sums.flatten(-2)[..., :length]


def chunked_discounted_returns(rewards: Tensor, discount: float, chunk_size: int = 128) -> Tensor:
    """Return ``G_t = sum_k discount^k r_{t+k}`` for rewards [..., T]."""
    return discounted_suffix_sums(rewards, discount, chunk_size)
