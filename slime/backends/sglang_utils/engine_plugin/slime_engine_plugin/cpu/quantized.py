"""Layers of FP8 and INT4 checkpoints on a CPU without AMX, where SGLang's own kernels do not run.

The weights are loaded and stored as SGLang does it on a GPU, and are multiplied by their scales when they are used:
this is for tests, where names, shapes and rounding of what is pushed count and speed does not. As on a GPU, INT4 layers
are rearranged after loading (to the layout of SGLang's Triton kernels), so that pushes have to undo it
(``repacked``); activations are not quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime_engine_plugin.hook_points import require

if TYPE_CHECKING:
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16 import (
        CompressedTensorsWNA16,
    )
    from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16_moe import (
        CompressedTensorsWNA16MoE,
    )
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod

_FP8 = "sglang.srt.layers.quantization.fp8"
_COMPRESSED = "sglang.srt.layers.quantization.compressed_tensors"
_INT4 = f"{_COMPRESSED}.schemes.compressed_tensors_wNa16.CompressedTensorsWNA16"
_INT4_EXPERTS = f"{_COMPRESSED}.schemes.compressed_tensors_wNa16_moe.CompressedTensorsWNA16MoE"


def as_loaded(method: object, layer: torch.nn.Module) -> None:
    """Replace FP8's ``process_weights_after_loading``: weights stay as they are, for the next push, too."""


def apply(
    method: Fp8LinearMethod, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Replace ``Fp8LinearMethod.apply``: the numbers of FP8 times their scales, times ``x``."""
    weight = layer.weight.float()
    if method.block_quant:
        weight = weight * _of_blocks(layer.weight_scale_inv, method.weight_block_size, weight.shape)
    else:  # one scale for each of the projections that are fused
        widths = torch.tensor(layer.logical_widths)
        weight = weight * layer.weight_scale.repeat_interleave(widths).unsqueeze(-1)
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def apply_experts(method: Fp8MoEMethod, layer: FusedMoE, dispatch_output: StandardDispatchOutput) -> Any:
    """Replace ``Fp8MoEMethod.apply``, for blocks."""
    if not method.block_quant:
        raise NotImplementedError("experts in FP8 per tensor do not run on a CPU; convert with --strategy block")
    x, parts = dispatch_output.hidden_states, {}
    for name in ("w13_weight", "w2_weight"):
        weight = getattr(layer, name).float()
        scale = _of_blocks(getattr(layer, f"{name}_scale_inv"), method.quant_config.weight_block_size, weight.shape)
        parts[name] = (weight * scale).to(x.dtype)
    return _through_experts(method, parts, dispatch_output)


def _of_blocks(scale: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    for dimension, length in zip((-2, -1), block, strict=True):
        scale = scale.repeat_interleave(length, dimension).narrow(dimension, 0, shape[dimension])
    return scale


def rearrange(scheme: object, layer: LinearBase) -> None:
    """Replace ``CompressedTensorsWNA16.process_weights_after_loading``: columns first, and no function that loads."""
    for name in ("weight_packed", "weight_scale", "weight_zero_point"):
        if name in layer._parameters:
            columns_first = layer._parameters[name].data.t().contiguous()
            layer.register_parameter(name, torch.nn.Parameter(columns_first, requires_grad=False))


def apply_int4(
    scheme: CompressedTensorsWNA16, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Replace ``CompressedTensorsWNA16.apply_weights``."""
    zeros = None if scheme.symmetric else _unpacked(layer.weight_zero_point)  # [groups, rows]
    weight = _times_scales(
        _unpacked(layer.weight_packed.t()), layer.weight_scale.t(), zeros if zeros is None else zeros.t()
    )
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def rearrange_experts(scheme: object, layer: FusedMoE) -> None:
    """Replace ``CompressedTensorsWNA16MoE.process_weights_after_loading``: rows first."""
    for name in ("weight_packed", "weight_scale"):
        for part in ("w13", "w2"):
            rows_first = layer._parameters[f"{part}_{name}"].data.transpose(1, 2).contiguous()
            layer.register_parameter(f"{part}_{name}", torch.nn.Parameter(rows_first, requires_grad=False))


def keep_config(
    scheme: Fp8MoEMethod | CompressedTensorsWNA16MoE, layer: object, moe_runner_config: MoeRunnerConfig
) -> None:
    """Replace ``create_moe_runner``, which looks for the kernels of a GPU."""
    scheme.moe_runner_config = moe_runner_config


def apply_int4_experts(
    scheme: CompressedTensorsWNA16MoE, layer: FusedMoE, dispatch_output: StandardDispatchOutput
) -> Any:
    """Replace ``CompressedTensorsWNA16MoE.apply_weights``. SGLang does not load zero points of experts."""
    x, parts = dispatch_output.hidden_states, {}
    for name in ("w13_weight", "w2_weight"):
        numbers, scale = _unpacked(getattr(layer, f"{name}_packed")), getattr(layer, f"{name}_scale")
        parts[name] = _times_scales(numbers, scale, None).to(x.dtype)
    return _through_experts(scheme, parts, dispatch_output)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Return the eight numbers of every int32, the last dimension being 8 times as long."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((packed.unsqueeze(-1) >> shifts) & 15).flatten(-2)


def _times_scales(numbers: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """Return fp32 ``[..., rows, columns]`` of numbers of that shape and scales and zeros ``[..., rows, groups]``."""
    groups = numbers.unflatten(-1, (scale.shape[-1], -1)) - (8 if zeros is None else zeros.unsqueeze(-1))
    return (groups * scale.float().unsqueeze(-1)).flatten(-2)


def _through_experts(
    method: Fp8MoEMethod | CompressedTensorsWNA16MoE,
    weights: dict[str, torch.Tensor],
    dispatched: StandardDispatchOutput,
) -> Any:
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    layer: Any = SimpleNamespace(num_experts=weights["w13_weight"].shape[0], **weights)
    output = moe_forward_native(layer, dispatched.hidden_states, dispatched.topk_output, method.moe_runner_config)
    return StandardCombineInput(hidden_states=output)


def register() -> None:
    """Register the hooks."""
    replaced: dict[str, tuple[str, Callable[..., Any]]] = {
        f"{_FP8}.Fp8LinearMethod.process_weights_after_loading": ("self layer", as_loaded),
        f"{_FP8}.Fp8LinearMethod.apply": ("self layer x bias", apply),
        f"{_FP8}.Fp8MoEMethod.process_weights_after_loading": ("self layer", as_loaded),
        f"{_FP8}.Fp8MoEMethod.create_moe_runner": ("self layer moe_runner_config", keep_config),
        f"{_FP8}.Fp8MoEMethod.apply": ("self layer dispatch_output", apply_experts),
        f"{_INT4}.process_weights_after_loading": ("self layer", rearrange),
        f"{_INT4}.apply_weights": ("self layer x bias", apply_int4),
        f"{_INT4_EXPERTS}.process_weights_after_loading": ("self layer", rearrange_experts),
        f"{_INT4_EXPERTS}.create_moe_runner": ("self layer moe_runner_config", keep_config),
        f"{_INT4_EXPERTS}.apply_weights": ("self layer dispatch_output", apply_int4_experts),
    }
    for target, (parameters, hook) in replaced.items():
        require(target, parameters)
        HookRegistry.register(target, hook, HookType.REPLACE)
    supported = f"{_COMPRESSED}.compressed_tensors.CompressedTensorsConfig._check_scheme_supported"
    HookRegistry.register(supported, lambda self, min_capability, error=True: True, HookType.REPLACE)
