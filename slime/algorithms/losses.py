"""Losses per token, of policies and of PPO's critic.

``ppo_kl = log p_old - log p_new``, so the probability ratio is ``r = exp(-ppo_kl)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from slime.arguments.args import Args


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return (loss, clip fraction) per token, the shape of ``ppo_kl``: PPO-clip (arXiv:1707.06347).

    ``max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A)``; a higher upper bound is DAPO's clip-higher
    (arXiv:2503.14476). ``eps_clip_c`` > 1 is dual clip (arXiv:1912.09729): for ``A < 0`` at most ``-c A``. The clip
    fraction is 1 where the clipped term exceeds the other.

    Raises ValueError for ``eps_clip_c`` <= 1.
    """
    if eps_clip_c is not None and eps_clip_c <= 1.0:
        raise ValueError(f"--eps-clip-c must be greater than 1, got {eps_clip_c}")
    ratio = torch.exp(-ppo_kl)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    clip_fraction = (clipped > unclipped).to(loss.dtype)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(-eps_clip_c * advantages, loss), loss)
    return loss, clip_fraction


def compute_cispo_loss(
    ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return (loss, clip fraction) per token: CISPO (MiniMax-M1, arXiv:2506.13585).

    ``-sg(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A log p``: the clipped ratio is a weight without gradient, so
    clipped tokens still learn. The clip fraction is 1 where clipping changed the ratio.
    """
    ratio = torch.exp(-ppo_kl.detach())
    weight = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -weight * advantages * log_probs, (weight != ratio).to(log_probs.dtype)


def sequence_kl(log_probs: Tensor, old_log_probs: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the masked mean of ``old - new`` over one whole response [T], a scalar; 0 for an empty mask."""
    return ((old_log_probs - log_probs) * loss_mask).sum() / loss_mask.sum().clamp_min(1)


def compute_gspo_kl(
    full_log_probs: Sequence[Tensor],
    full_old_log_probs: Sequence[Tensor],
    local_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> Tensor:
    """Return ``ppo_kl`` for GSPO (arXiv:2507.18071), [sum of local lengths]: one sequence ratio for all its tokens.

    full_*, loss_masks: [response_length_i] per sample, gathered over context parallelism. local_log_probs: [n_local_i],
    give the number of tokens this rank computes the loss for.
    """
    kls = [
        sequence_kl(new, old, mask).expand(local.size(0))
        for new, old, local, mask in zip(full_log_probs, full_old_log_probs, local_log_probs, loss_masks, strict=True)
    ]
    return torch.cat(kls)


def compute_opsm_mask(
    args: Args,
    full_log_probs: Sequence[Tensor],
    full_old_log_probs: Sequence[Tensor],
    advantages: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return (mask [sum of local lengths], scalar metric): off-policy sequence masking (DeepSeek-V3.2).

    The mask is 0 for tokens with ``A < 0`` of a sequence that drifted, ``sequence_kl > args.opsm_delta``, else 1. The
    metric sums over sequences the share of their trained tokens that are masked. full_* and loss_masks: whole
    responses; advantages: local tokens, of which those that are trained are not known where they are a part: their
    share of all tokens is taken.
    """
    keep, metric = [], torch.zeros((), device=advantages[0].device)
    for new, old, advantage, mask in zip(full_log_probs, full_old_log_probs, advantages, loss_masks, strict=True):
        dropped = ((advantage < 0) & (sequence_kl(new, old, mask) > args.opsm_delta)).float()
        whole = dropped.shape == mask.shape
        metric = metric + ((dropped * mask).sum() / mask.sum().clamp_min(1) if whole else dropped.sum() / mask.numel())
        keep.append(1 - dropped)
    return torch.cat(keep), metric


def compute_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float) -> tuple[Tensor, Tensor]:
    """Return (loss, clip fraction) per token, the shape of ``values``: the clipped value loss of PPO.

    ``max((clip(V, V_old - value_clip, V_old + value_clip) - G)^2, (V - G)^2)``; the clip fraction is 1 where
    ``|V - V_old| > value_clip``.
    """
    clipped = torch.maximum(torch.minimum(values, old_values + value_clip), old_values - value_clip)
    loss = torch.maximum((clipped - returns).square(), (values - returns).square())
    return loss, ((values - old_values).abs() > value_clip).to(loss.dtype)
