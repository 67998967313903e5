"""Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slime.algorithms.scan import discounted_suffix_sums


def vanilla_gae(rewards: Tensor, values: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), each [B, T], by the recursion of the paper; ``V_T = 0`` after the last token.

    ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lambda A_{t+1}``, ``returns = A + V``.
    """
    deltas = _deltas(rewards, values, gamma)
    advantages = torch.zeros_like(deltas)
    running = torch.zeros_like(deltas[..., 0]) if deltas.size(-1) else deltas[..., :0]
    for t in reversed(range(deltas.size(-1))):
        running = deltas[..., t] + gamma * lambd * running
        advantages[..., t] = running
    return advantages, advantages + values


def chunked_gae(
    rewards: Tensor, values: Tensor, gamma: float, lambd: float, chunk_size: int = 128
) -> tuple[Tensor, Tensor]:
    """``vanilla_gae`` by chunks: the same numbers up to rounding, without a loop over tokens or chunks."""
    advantages = discounted_suffix_sums(_deltas(rewards, values, gamma), gamma * lambd, chunk_size)
    return advantages, advantages + values


def get_advantages_and_returns_batch(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    values_list: Sequence[Tensor],
    rewards_list: Sequence[Tensor],
    gamma: float,
    lambd: float,
    chunked: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return per-sample (advantages, returns) from per-sample values and token rewards, all [response_length_i].

    Whole responses: under context parallelism gather them first and slice the result. Raises ValueError for a length
    that differs from ``response_lengths``.
    """
    del total_lengths  # part of the signature known to callers; whole responses need no offsets
    if not response_lengths:
        return [], []
    for i, length in enumerate(response_lengths):
        if values_list[i].shape != (length,) or rewards_list[i].shape != (length,):
            raise ValueError(
                f"sample {i}: values {tuple(values_list[i].shape)} and rewards {tuple(rewards_list[i].shape)}, "
                f"expected one each for {length} response tokens; gather context-parallel slices first"
            )
    # zeros after the end add nothing: r = V = 0 there, so delta = 0
    values = pad_sequence(list(values_list), batch_first=True)
    rewards = pad_sequence(list(rewards_list), batch_first=True)
    advantages, returns = (chunked_gae if chunked else vanilla_gae)(rewards, values, gamma, lambd)
    return (
        [row[:length] for row, length in zip(advantages, response_lengths, strict=True)],
        [row[:length] for row, length in zip(returns, response_lengths, strict=True)],
    )


def token_rewards(reward: float, kl: Tensor, kl_coef: float) -> Tensor:
    """Return per-token rewards [T] of PPO: ``-kl_coef * kl_t``, plus the sample's reward at the last response token.

    ``kl`` [T] covers the whole response; an empty response has no token to carry the reward.
    """
    rewards = -kl_coef * kl
    if rewards.numel():
        rewards[-1] += reward
    return rewards


def _deltas(rewards: Tensor, values: Tensor, gamma: float) -> Tensor:
    deltas = rewards - values
    deltas[..., :-1] += gamma * values[..., 1:]
    return deltas
