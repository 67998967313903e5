"""The mismatch between the log-probs of an engine and of the trainer on the tokens that the engine sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""exp of more would overflow what it is added to; log-ratios that mean anything are far below."""


def mismatch_sums(train_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor) -> Tensor:
    """Return [5] of one sample: sums of ``|d|``, of k1 and of k3, the number of trained tokens, the largest ``|d|``.

    With ``d = log p_train - log p_rollout`` at trained tokens, all arguments [n]. k1 ``-d`` and k3 ``exp(d) - 1 - d``
    (Schulman, "Approximating KL Divergence", 2020) estimate KL(rollout || train) from the engine's samples; in k3 ``d``
    is bounded to +-20. Masked tokens count for nothing, with any log-probs. float64, without gradient; an empty
    response gives zeros, NaN stays NaN.
    """
    return mismatch_sums_by_sample(train_log_probs, rollout_log_probs, loss_mask, [train_log_probs.numel()])[0]


def mismatch_sums_by_sample(
    train_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor, lengths: Sequence[int]
) -> Tensor:
    """Return ``mismatch_sums`` [samples, 5] of samples of ``lengths``, one after the other in the arguments."""
    trained = loss_mask > 0
    # selected by where, not by indexing, for which a GPU would have to send the count to the host
    d = torch.where(trained, train_log_probs.detach().double() - rollout_log_probs.detach().double(), 0.0)
    bounded = d.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    distance = d.abs()
    terms = torch.stack([distance, -d, torch.expm1(bounded) - bounded, trained.double()], dim=1)
    sizes = torch.tensor(lengths, device=d.device)
    # unsafe: the lengths are not checked, for which a GPU would have to wait
    sums = torch.segment_reduce(terms, "sum", lengths=sizes, initial=0, unsafe=True)
    largest = torch.segment_reduce(distance, "max", lengths=sizes, initial=0, unsafe=True)
    return torch.cat([sums, largest.unsqueeze(1)], dim=1)


def combine(sums: Tensor) -> Tensor:
    """Return [5] over samples, micro-batches or ranks from ``mismatch_sums`` [n, 5]."""
    return torch.cat([sums[:, :4].sum(dim=0), sums[:, 4].amax(dim=0, keepdim=True)])
