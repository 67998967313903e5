"""Advantages and returns: of one reward per sample, and generalized advantage estimation with a value function.

First the functions that the table ``slime.algorithms.estimators`` names, which take this rank's part of a batch. The
formulas below them take whole responses (under context parallelism the outcome of ``reinforce_plus_plus`` and of GAE
depends on tokens of other ranks: gather, compute, slice) and return one tensor [response_length_i] per sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slime.algorithms.trained_tokens import TrainedTokens

if TYPE_CHECKING:
    from slime.arguments.args import Args

Rewards = Sequence[float] | Tensor
Column = list[Tensor]
"""One tensor per sample."""


class Layout(Protocol):
    """The response tokens of the batch that this context-parallel rank holds."""

    def local(self, column: Sequence[Tensor], /) -> Sequence[Tensor]:
        """Cut whole responses [response_length_i] to this rank's parts [n_local_i]."""

    def whole(self, column: Sequence[Tensor], /) -> Column:
        """Join the parts of all ranks to whole responses (collective)."""


@dataclass(frozen=True)
class EstimatorInputs:
    """A rank's samples, as the function of an estimator gets them.

    rewards: one per sample, minus the estimator's baseline. kl [n_local_i]: to the reference, 0 without ``--kl-coef``.
    loss_masks [response_length_i]: of whole responses. values [n_local_i]: the critic's. response_kl: one per sample,
    the KL summed over the response, minus the baseline, for estimators with ``kl="response"``.
    """

    rewards: Sequence[float]
    kl: Sequence[Tensor]
    loss_masks: Sequence[Tensor]
    layout: Layout
    values: Sequence[Tensor] = ()
    response_kl: Sequence[float] = ()


# Functions of the table: (advantages, returns), each [n_local_i]


def grpo(args: Args, inputs: EstimatorInputs) -> tuple[Column, Column]:
    """GRPO, GSPO and CISPO: the reward at every token."""
    return _as_advantages(get_grpo_returns(inputs.rewards, inputs.kl))


def reinforce_plus_plus(args: Args, inputs: EstimatorInputs) -> tuple[Column, Column]:
    """REINFORCE++; zeros for a sample without a trained token, say one whose reward failed."""
    kl = inputs.layout.whole(inputs.kl)
    returns = [torch.zeros_like(values) for values in kl]
    trained = [i for i, mask in enumerate(inputs.loss_masks) if bool((mask != 0).any())]
    lengths = [inputs.loss_masks[i].size(0) for i in trained]
    found = get_reinforce_plus_plus_returns(
        [inputs.rewards[i] for i in trained],
        [kl[i] for i in trained],
        [inputs.loss_masks[i] for i in trained],
        lengths,
        lengths,
        args.kl_coef,
        args.gamma,
    )
    for i, values in zip(trained, found, strict=True):
        returns[i] = values
    return _as_advantages(list(inputs.layout.local(returns)))


def reinforce_plus_plus_baseline(args: Args, inputs: EstimatorInputs) -> tuple[Column, Column]:
    """REINFORCE++-baseline: the reward minus each token's KL."""
    return _as_advantages(
        get_reinforce_plus_plus_baseline_advantages(inputs.rewards, inputs.kl, inputs.loss_masks, args.kl_coef)
    )


def rloo(args: Args, inputs: EstimatorInputs) -> tuple[Column, Column]:
    """RLOO: the reward minus the KL of the response, at every token."""
    return _as_advantages(get_rloo_advantages(inputs.rewards, inputs.kl, inputs.response_kl, args.kl_coef))


def ppo(args: Args, inputs: EstimatorInputs) -> tuple[Column, Column]:
    """PPO: generalized advantage estimation over the trained tokens, with the critic's values."""
    trained = TrainedTokens(inputs.loss_masks)
    kls, values = (trained.close_up(inputs.layout.whole(column)) for column in (inputs.kl, inputs.values))
    per_token = [token_rewards(reward, kl, args.kl_coef) for reward, kl in zip(inputs.rewards, kls, strict=True)]
    found = get_advantages_and_returns_batch(
        trained.lengths, trained.lengths, values, per_token, args.gamma, args.lambd
    )
    advantages, returns = (list(inputs.layout.local(trained.spread(column))) for column in found)
    return advantages, returns


def _as_advantages(returns: Column) -> tuple[Column, Column]:
    return [values.clone() for values in returns], returns


# Advantages of one reward per sample


def get_grpo_returns(rewards: Rewards, kl: Sequence[Tensor]) -> list[Tensor]:
    """Return the sample's reward at every token: ``A_t = R`` (GRPO, arXiv:2402.03300; also GSPO and CISPO).

    rewards: n, already normalized within their groups. kl: n tensors that give shape, dtype and device.
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
    """Return discounted returns ``G_t = sum_k gamma^k r_{t+k}`` over trained tokens (REINFORCE++, arXiv:2501.03262).

    ``r_t = -kl_coef * kl_t``, plus the sample's reward at its last trained token; 0 at the tokens that are not trained.
    Raises ValueError for a sample without a trained token (nothing carries its reward; an AssertionError too, as in
    slime <= 0.3.1) and for tensors that do not cover the whole response.
    """
    del total_lengths  # part of the signature known to callers; whole responses need no offsets
    if not len(loss_masks):
        return []
    trained = TrainedTokens(loss_masks)
    for i, (reward, kl_i, mask) in enumerate(zip(rewards, kl, loss_masks, strict=True)):
        if kl_i.size(0) != response_lengths[i] or mask.size(0) != response_lengths[i]:
            raise ValueError(
                f"sample {i}: kl has {kl_i.size(0)} and the loss mask {mask.size(0)} entries for {response_lengths[i]} "
                "response tokens; gather context-parallel slices first"
            )
        if not trained.lengths[i]:
            raise FullyMaskedSampleError(
                f"sample {i} is fully masked: reinforce_plus_plus has no token to put its reward {float(reward)} on; "
                "drop such samples in a filter"
            )
    per_token = zip(rewards, trained.close_up(kl), strict=True)
    return trained.spread(
        [discounted_suffix_sums(token_rewards(float(reward), kl_i, kl_coef), gamma) for reward, kl_i in per_token]
    )


def get_reinforce_plus_plus_baseline_advantages(
    rewards: Rewards, kl: Sequence[Tensor], loss_masks: Sequence[Tensor], kl_coef: float
) -> list[Tensor]:
    """Return ``A_t = R - kl_coef * kl_t`` (REINFORCE++-baseline); rewards have their group's mean subtracted already.

    ``loss_masks`` is part of the signature known to callers: masked tokens are left out by the loss.
    """
    del loss_masks
    return [float(reward) - kl_coef * kl_i for reward, kl_i in zip(rewards, kl, strict=True)]


def get_rloo_advantages(
    rewards: Rewards, kl: Sequence[Tensor], centered_kl: Sequence[float], kl_coef: float
) -> list[Tensor]:
    """Return ``A_t = R - kl_coef * K`` at every token (RLOO, arXiv:2402.14740): the response is one action.

    rewards: n, minus the mean of the group's other trajectories (``rewards.leave_one_out``). centered_kl: n, the summed
    KL of each response to the reference, minus the same baseline (it is linear: rewards and KL are centered apart). kl:
    n tensors that give shape, dtype and device.
    """
    return [
        torch.full_like(kl_i, float(reward) - kl_coef * penalty)
        for reward, penalty, kl_i in zip(rewards, centered_kl, kl, strict=True)
    ]


class FullyMaskedSampleError(ValueError, AssertionError):
    """A sample without any trained token reached an estimator that needs one."""


# On-policy distillation: a penalty for what the teacher finds unlikely, token by token


def distill(
    advantages: Sequence[Tensor],
    student_log_probs: Sequence[Tensor],
    teacher_log_probs: Sequence[Tensor],
    kl_coef: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (advantages, reverse KL), one tensor [n_i] per sample: ``A_t - kl_coef * k_t``, ``k_t`` itself.

    ``k_t = log p_student(y_t) - log p_teacher(y_t)`` is, for tokens that the student sampled, the unbiased estimate of
    KL(student, teacher) at position t; as part of the advantage it is a reward per token and carries no gradient
    (Thinking Machines Lab, "On-Policy Distillation", 2025; the objective is that of MiniLLM, arXiv:2306.08543). A term
    of the tokens that follow is not counted (discount 0), as there.

    Raises ValueError, with the sample's position, for lengths that disagree.
    """
    distilled, reverse_kl = [], []
    rows = zip(advantages, student_log_probs, teacher_log_probs, strict=True)
    for i, (advantage, student, teacher) in enumerate(rows):
        if not advantage.shape == student.shape == teacher.shape:
            raise ValueError(
                f"sample {i}: {tuple(advantage.shape)} advantages, {tuple(student.shape)} log-probs of the student and "
                f"{tuple(teacher.shape)} of the teacher; expected one of each per response token"
            )
        with torch.no_grad():
            kl = student - teacher.to(student)
            distilled.append(advantage - kl_coef * kl)
        reverse_kl.append(kl)
    return distilled, reverse_kl


# Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438)


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

    Whole responses: under context parallelism gather them first and slice the result. Every token is taken for an
    action; where a response has others, close it up before and spread the result (``TrainedTokens``). Raises ValueError
    for a length that differs from ``response_lengths``.
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
    """Return the rewards [T] of a response's trained tokens: ``-kl_coef * kl_t``, plus the sample's reward at the last.

    ``kl`` [T] is that of the trained tokens; without any, nothing carries the reward.
    """
    rewards = -kl_coef * kl
    if rewards.numel():
        rewards[-1] += reward
    return rewards


def _deltas(rewards: Tensor, values: Tensor, gamma: float) -> Tensor:
    deltas = rewards - values
    deltas[..., :-1] += gamma * values[..., 1:]
    return deltas


# Discounted sums of the future, in blocks instead of token by token


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
