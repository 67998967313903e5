"""Whitening of advantages over all trained tokens of a step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms.trained_tokens import where_trained


def masked_whiten(
    values: Tensor,
    mask: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> Tensor:
    """Return ``(values - mean) * rsqrt(var + epsilon)`` [N] with moments over the masked entries of the whole group.

    mask: [N], 0/1 (or weights). The variance is unbiased (Bessel's correction; a single entry keeps its biased 0). With
    ``shift_mean`` False the mean is added back. ``group`` is usually DP x CP; None: this process alone. Masked entries
    are transformed like the others. Two passes in float64, so the offset of the values costs no digits.

    Raises ValueError when the mask of the whole group is empty, on every rank alike.
    """
    wide, weights = values.double(), mask.double()
    total = _sum_over(torch.stack([(where_trained(mask, wide) * weights).sum(), weights.sum()]), group)
    count = float(total[1])
    if count <= 0:
        raise ValueError("advantages cannot be normalized: every response token of the step is masked, on all ranks")
    mean = total[0] / count
    squares = _sum_over((where_trained(mask, wide - mean).square() * weights).sum(), group)
    variance = squares / max(count - 1, 1)
    whitened = (wide - mean) * torch.rsqrt(variance + epsilon)
    return (whitened if shift_mean else whitened + mean).to(values.dtype)


def _sum_over(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(value, group=group)
    return value
