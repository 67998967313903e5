"""The measurements of ``mis`` under the names that dashboards of the example in slime <= 0.3.1 have.

Where ``mis`` has the same number it is that; perplexities, their ratio and the chi-squared divergences are here alone.
All are per token of one sample, to be averaged over trained tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.algorithms.mismatch import LARGEST_LOG_RATIO


def perplexities(train_log_ppl: Tensor, rollout_log_ppl: Tensor) -> dict[str, Tensor]:
    """Return how likely a response is to trainer and engine, of its log-perplexities [n]."""
    difference = train_log_ppl - rollout_log_ppl
    return {
        "mis_training_log_ppl": train_log_ppl,
        "mis_training_ppl": train_log_ppl.exp(),
        "mis_rollout_ppl": rollout_log_ppl.exp(),
        "mis_log_ppl_diff": difference,
        "mis_log_ppl_abs_diff": difference.abs(),
        "mis_ppl_ratio": difference.exp(),
    }


def chi_squared(difference: Tensor, trained: Tensor) -> dict[str, Tensor]:
    """Return ``E[ratio^2] - 1`` [n] of tokens and of the whole response: the variance of importance weights.

    difference: log p_train - log p_rollout [n]. trained: 1 at trained tokens, else 0 [n].
    """

    def squared(log_ratio: Tensor) -> Tensor:
        return (2 * log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)).exp() - 1

    total = torch.where(trained != 0, difference, 0).sum().expand_as(difference)
    return {"mis_chi2_token": squared(difference), "mis_chi2_seq": squared(total)}


def of_bounds(mode: str, ratio: Tensor, weight: Tensor, low: Tensor, high: Tensor) -> dict[str, Tensor]:
    """Return the weights [n] before and after the bounds of ``mode``, and what is below and above them."""
    named = {"mis_tis_weight_before_bound": ratio, "mis_tis_weight_after_bound": weight}
    if mode == "truncate":
        return named | {"mis_tis_truncate_fraction": high}
    return named | {f"mis_tis_{mode}_fraction_low": low, f"mis_tis_{mode}_fraction_high": high}
