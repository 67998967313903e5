"""Weights that correct for engines sampling from slightly other probabilities than the trainer computes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ImportanceWeights(NamedTuple):
    """Per-token tensors without gradient. weights: factors for the policy loss. ratio: ``p_train / p_rollout``.
    clipped: 1 where the weight differs from the ratio. deviation: ``|ratio - 1|``."""

    weights: Tensor
    ratio: Tensor
    clipped: Tensor
    deviation: Tensor


def truncated_importance_weights(
    train_log_probs: Tensor, rollout_log_probs: Tensor, low: float, high: float
) -> ImportanceWeights:
    """Truncated importance sampling (Yao et al. 2025): ``clamp(exp(log p_train - log p_rollout), low, high)``."""
    ratio = _ratio(train_log_probs, rollout_log_probs)
    return _result(ratio.clamp(low, high), ratio)


def icepop_weights(train_log_probs: Tensor, rollout_log_probs: Tensor, low: float, high: float) -> ImportanceWeights:
    """IcePop (Ling team 2025): the ratio itself within [low, high], 0 outside: such tokens train nothing."""
    ratio = _ratio(train_log_probs, rollout_log_probs)
    return _result(torch.where((ratio >= low) & (ratio <= high), ratio, 0), ratio)


def _ratio(train_log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    return torch.exp(train_log_probs.detach() - rollout_log_probs.detach())


def _result(weights: Tensor, ratio: Tensor) -> ImportanceWeights:
    return ImportanceWeights(weights, ratio, (weights != ratio).to(ratio.dtype), (ratio - 1).abs())
