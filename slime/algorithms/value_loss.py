"""Clipped value loss of PPO's critic."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float) -> tuple[Tensor, Tensor]:
    """Return (loss, clip fraction) per token, the shape of ``values``.

    ``max((clip(V, V_old - value_clip, V_old + value_clip) - G)^2, (V - G)^2)``; the clip fraction is 1 where
    ``|V - V_old| > value_clip``.
    """
    clipped = torch.maximum(torch.minimum(values, old_values + value_clip), old_values - value_clip)
    loss = torch.maximum((clipped - returns).square(), (values - returns).square())
    return loss, ((values - old_values).abs() > value_clip).to(loss.dtype)
