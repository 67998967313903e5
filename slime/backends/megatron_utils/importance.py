"""Importance corrections between engine and trainer with the signature of ``--custom-tis-function-path``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.importance import ImportanceWeights, icepop_weights, truncated_importance_weights

Corrected = tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]


def vanilla_tis_function(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **kwargs: Any,
) -> Corrected:
    """Multiply ``pg_loss`` [n] by ``clamp(p_train / p_rollout, tis_clip_low, tis_clip)`` per token.

    ``*_log_probs``: local tensors per sample, n values together. Returns (loss [n], the masks as they came, per-token
    metrics ``tis`` (the ratio), ``tis_clipfrac``, ``tis_abs``).
    """
    del kwargs
    return _corrected(args, truncated_importance_weights, pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def icepop_function(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **kwargs: Any,
) -> Corrected:
    """As ``vanilla_tis_function`` with IcePop's weights: the ratio within the bounds, 0 outside of them."""
    del kwargs
    return _corrected(args, icepop_weights, pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def _corrected(
    args: Namespace,
    weigh: Callable[[Tensor, Tensor, float, float], ImportanceWeights],
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> Corrected:
    train, rollout = torch.cat(list(train_log_probs)), torch.cat(list(rollout_log_probs))
    result = weigh(train, rollout, args.tis_clip_low, args.tis_clip)
    metrics = {"tis": result.ratio, "tis_clipfrac": result.clipped, "tis_abs": result.deviation}
    return pg_loss * result.weights, loss_masks, metrics
