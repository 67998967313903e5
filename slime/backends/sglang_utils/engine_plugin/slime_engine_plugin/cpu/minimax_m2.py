"""MiniMax-M2 on a CPU: the norm of its queries and keys, over the heads of all ranks, which is Triton's."""

from __future__ import annotations

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime_engine_plugin.hook_points import require

_MODEL = "sglang.srt.models.minimax_m2"


def sums_of_squares(x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """Replace ``rms_sumsq_serial``: the sums of this rank's heads, all of queries, then all of keys."""
    return torch.cat([x.float().square().sum(dim=-1) for x in (x1, x2)])


def normalize(
    x1: torch.Tensor,
    x2: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    sum_sq: torch.Tensor,
    tp_world: int = 1,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, ...]:
    """Replace ``rms_apply_serial``: normalize by the sums of all ranks."""
    sums = sum_sq[: 2 * len(x1), None].chunk(2)
    scales = [(total / (x.shape[1] * tp_world) + eps).rsqrt() for total, x in zip(sums, (x1, x2), strict=True)]
    return tuple((x.float() * s * w.float()).to(x.dtype) for x, s, w in zip((x1, x2), scales, (w1, w2), strict=True))


def register() -> None:
    """Register the hooks."""
    require(f"{_MODEL}.rms_sumsq_serial", "x1 x2")
    require(f"{_MODEL}.rms_apply_serial", "x1 x2 w1 w2 sum_sq tp_world eps")
    HookRegistry.register(f"{_MODEL}.rms_sumsq_serial", sums_of_squares, HookType.REPLACE)
    HookRegistry.register(f"{_MODEL}.rms_apply_serial", normalize, HookType.REPLACE)
