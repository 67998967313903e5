"""Advantages from one reward per sample, for estimators without a value function.

All take whole responses (under context parallelism the outcome of ``reinforce_plus_plus`` depends on tokens of other
ranks: gather, compute, slice) and return one tensor [response_length_i] per sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.algorithms.scan import discounted_suffix_sums

Rewards = Sequence[float] | Tensor


def get_grpo_returns(rewards: Rewards, kl: Sequence[Tensor]) -> list[Tensor]:
    """Return the sample's reward at every token: ``A_t = R`` (GRPO, arXiv:2402.03300; also GSPO and CISPO).

    rewards: n, already normalised within their groups. kl: n tensors that give shape, dtype and device.
    """
    return [torch.full_like(kl_i, float(reward)) for reward, kl_i in zip(rewards, kl, strict=True)]


def get_reinforce_plus_plus_returns(
    rewards: Rewards,
    kl: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    response_lengths: Sequence[int],
    total_lengths: Sequence[int],
    kl_coef: float,
    gamma: float,
) -> list[Tensor]:
    """Return discounted returns ``G_t = sum_k gamma^k r_{t+k}`` (REINFORCE++, arXiv:2501.03262).

    ``r_t = -kl_coef * kl_t * mask_t``, plus the sample's reward at its last unmasked token. Raises ValueError for a
    sample without unmasked token (nothing carries its reward; an AssertionError too, as in slime <= 0.3.1) and for
    tensors that do not cover the whole response.
    """
    del total_lengths  # part of the signature known to callers; whole responses need no offsets
    returns = []
    for i, (reward, kl_i, mask) in enumerate(zip(rewards, kl, loss_masks, strict=True)):
        if kl_i.size(0) != response_lengths[i] or mask.size(0) != response_lengths[i]:
            raise ValueError(
                f"sample {i}: kl has {kl_i.size(0)} and the loss mask {mask.size(0)} entries for {response_lengths[i]} "
                "response tokens; gather context-parallel slices first"
            )
        trained = mask.nonzero()
        if not trained.numel():
            raise FullyMaskedSampleError(
                f"sample {i} is fully masked: reinforce_plus_plus has no token to put its reward {float(reward)} on; "
                "drop such samples in a filter"
            )
        token_rewards = -kl_coef * kl_i * mask
        token_rewards[trained[-1]] += float(reward)
        returns.append(discounted_suffix_sums(token_rewards, gamma))
    return returns


def get_reinforce_plus_plus_baseline_advantages(
    rewards: Rewards, kl: Sequence[Tensor], loss_masks: Sequence[Tensor], kl_coef: float
) -> list[Tensor]:
    """Return ``A_t = R - kl_coef * kl_t`` (REINFORCE++-baseline); rewards have their group's mean subtracted already.

    ``loss_masks`` is part of the signature known to callers: masked tokens are left out by the loss.
    """
    del loss_masks
    return [float(reward) - kl_coef * kl_i for reward, kl_i in zip(rewards, kl, strict=True)]


def get_rloo_advantages(
    rewards: Rewards, kl: Sequence[Tensor], centred_kl: Sequence[float], kl_coef: float
) -> list[Tensor]:
    """Return ``A_t = R - kl_coef * K`` at every token (RLOO, arXiv:2402.14740): the response is one action.

    rewards: n, minus the mean of the group's other executions (``rewards.leave_one_out``). centred_kl: n, the summed KL
    of each response to the reference, with the same baseline taken off (being linear, it may be taken off apart). kl: n
    tensors that give shape, dtype and device.
    """
    return [
        torch.full_like(kl_i, float(reward) - kl_coef * penalty)
        for reward, penalty, kl_i in zip(rewards, centred_kl, kl, strict=True)
    ]


class FullyMaskedSampleError(ValueError, AssertionError):
    """A sample without any trained token reached an estimator that needs one."""
