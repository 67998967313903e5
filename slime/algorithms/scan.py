"""Discounted sums of the future, in blocks instead of token by token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def discounted_suffix_sums(values: Tensor, decay: float, chunk_size: int = 128) -> Tensor:
    """Return ``S_t = sum_k decay^k * values_{t+k}`` along the last axis; shape and dtype of ``values`` [..., T].

    A chunk is one product with a triangular matrix of powers; only the first sum of a chunk is carried to the one
    before: T / chunk_size sequential steps instead of T.
    """
    length = values.size(-1)
    if length == 0:
        return values.clone()
    chunk = min(chunk_size, length)
    steps = torch.arange(chunk, device=values.device)
    # powers[j, i] = decay^(j - i) for j >= i: column i sums what follows position i within the chunk
    distance = steps.unsqueeze(1) - steps
    powers = torch.where(distance >= 0, decay ** distance.clamp_min(0).to(values.dtype), 0).to(values.dtype)
    to_next = decay ** (chunk - steps).to(values.dtype)
    chunks = F.pad(values, (0, -length % chunk)).unflatten(-1, (-1, chunk))
    sums = chunks @ powers
    carry = torch.zeros_like(sums[..., 0, 0])
    result = []
    for index in reversed(range(sums.size(-2))):
        whole = sums[..., index, :] + to_next * carry.unsqueeze(-1)
        carry = whole[..., 0]
        result.append(whole)
    return torch.cat(result[::-1], dim=-1)[..., :length]


def chunked_discounted_returns(rewards: Tensor, gamma: float, chunk_size: int = 128) -> Tensor:
    """Return ``G_t = sum_k gamma^k r_{t+k}`` for rewards [..., T]."""
    return discounted_suffix_sums(rewards, gamma, chunk_size)
