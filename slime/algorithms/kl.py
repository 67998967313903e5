"""Estimators of KL(p || p_base) from samples of p."""

from __future__ import annotations

import torch
from torch import Tensor

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")
_LOW_VAR_LIMIT = 10.0
_FINITE_EXP = 80.0  # in float32


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: str, importance_ratio: Tensor | None = None
) -> Tensor:
    """Return the per-token KL estimate, the shape of ``log_probs`` (any), in float32 or wider.

    With ``d = log p - log p_base`` (Schulman, "Approximating KL Divergence", 2020): k1 ``d``; k2 ``d^2 / 2``; k3
    ``exp(-d) - 1 + d``; low_var_kl is k3 clamped to [-10, 10]. ``importance_ratio`` (``p / p_sampling``, for tokens
    sampled from another policy; DeepSeek-V3.2's unbiased estimate) multiplies before the clamp and keeps its gradient.

    Raises ValueError for an unknown type.
    """
    if kl_loss_type not in KL_TYPES:
        raise ValueError(f"--kl-loss-type {kl_loss_type!r} is unknown; expected one of {', '.join(KL_TYPES)}")
    dtype = torch.promote_types(torch.promote_types(log_probs.dtype, log_probs_base.dtype), torch.float32)
    d = log_probs.to(dtype) - log_probs_base.to(dtype)
    if kl_loss_type == "k1":
        kl = d
    elif kl_loss_type == "k2":
        kl = d.square() / 2
    else:
        if kl_loss_type == "low_var_kl":  # at its limit there; an infinite exp would make a NaN of its gradient
            d = d.clamp(-_FINITE_EXP, _FINITE_EXP)
        kl = torch.expm1(-d) + d  # exp(-d) - 1 + d would lose all digits for the small d of a first step
    if importance_ratio is not None:
        kl = importance_ratio * kl
    return kl.clamp(-_LOW_VAR_LIMIT, _LOW_VAR_LIMIT) if kl_loss_type == "low_var_kl" else kl
