"""Linear layers of FP8 checkpoints (blocks) on a CPU without AMX, where SGLang's own kernels do not run.

The weights are loaded and stored as SGLang does it on a GPU, and are multiplied by their scales when they are used:
this is for tests, where names, shapes and rounding of what is pushed count and speed does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime_engine_plugin.hook_points import require

_LINEAR = "sglang.srt.layers.quantization.fp8.Fp8LinearMethod"


def as_loaded(original: Callable[..., None], method: Any, layer: torch.nn.Module) -> None:
    """Around ``process_weights_after_loading``: weights in blocks stay as they are, for the next push, too."""
    if not method.block_quant:
        original(method, layer)


def apply(
    original: Callable[..., torch.Tensor],
    method: Any,
    layer: Any,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Around ``apply``: the numbers of FP8 times the scales of their blocks, times ``x``."""
    if not method.block_quant:
        return original(method, layer, x, bias)
    weight: torch.Tensor = layer.weight.float()
    scale: torch.Tensor = layer.weight_scale_inv
    for dimension, length in enumerate(method.weight_block_size):
        scale = scale.repeat_interleave(length, dimension).narrow(dimension, 0, weight.shape[dimension])
    return torch.nn.functional.linear(x, (weight * scale).to(x.dtype), bias)


def register() -> None:
    """Register the hooks."""
    require(f"{_LINEAR}.process_weights_after_loading", "self layer")
    require(f"{_LINEAR}.apply", "self layer x bias")
    HookRegistry.register(f"{_LINEAR}.process_weights_after_loading", as_loaded, HookType.AROUND)
    HookRegistry.register(f"{_LINEAR}.apply", apply, HookType.AROUND)
