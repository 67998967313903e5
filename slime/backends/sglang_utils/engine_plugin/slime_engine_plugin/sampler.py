"""Sampling on a CPU: one uniform number per row instead of one exponential per vocabulary entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def sample(original: Callable[..., torch.Tensor], probs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Around ``sampling_from_probs_torch``: int32 [rows], drawn from ``probs`` [rows, vocabulary] by inversion.

    The distribution is that of the probabilities up to float32 rounding of their sum. With a seed per request SGLang's
    own function draws. Raises RuntimeError for rows that are no distribution, as ``torch.multinomial`` does.
    """
    if args or any(value is not None for name, value in kwargs.items() if name == "sampling_seed"):
        return original(probs, *args, **kwargs)
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1:]
    if not bool((torch.isfinite(total) & (total > 0)).all()):
        raise RuntimeError("next-token probabilities are not finite, or all zero: the model's weights are bad")
    drawn = torch.searchsorted(cumulative, torch.rand_like(total) * total, right=True).squeeze(-1)
    past_the_end = drawn >= probs.shape[-1]  # the product was rounded up to the total
    if bool(past_the_end.any()):
        drawn = torch.where(past_the_end, probs.argmax(dim=-1), drawn)
    return drawn.to(torch.int32)


def register() -> None:
    """Register the hook."""
    HookRegistry.register("sglang.srt.layers.sampler.sampling_from_probs_torch", sample, HookType.AROUND)
