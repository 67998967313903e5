"""Pushes to layers whose weights SGLang rearranges when it has loaded them: INT4, and FP8 per tensor.

For their kernels SGLang replaces the parameters of such layers by others, of other shapes and without the functions
that load them: a pushed weight fits them no more. Stock SGLang can restore some of them, and never does.

Here the parameters as they were made are remembered. Before the first part of a push they are restored, in the memory
of those in use; after the last one, which alone carries the version, SGLang rearranges them again, and the numbers go
to where those in use were, since CUDA graphs have recorded their addresses. A push therefore takes the memory of one
rearranged layer, must be complete, and must end with a part that carries a version, as slime's do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqInput, UpdateWeightsFromTensorReqInput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

_SCHEMES = "sglang.srt.layers.quantization.compressed_tensors.schemes"
INT4 = (
    f"{_SCHEMES}.compressed_tensors_wNa16.CompressedTensorsWNA16",
    f"{_SCHEMES}.compressed_tensors_wNa16_moe.CompressedTensorsWNA16MoE",
    f"{_SCHEMES}.compressed_tensors_wNa16_moe.CompressedTensorsWNA16TritonMoE",
)
FP8 = ("sglang.srt.layers.quantization.fp8.Fp8LinearMethod", "sglang.srt.layers.quantization.fp8.Fp8MoEMethod")
_RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_DONE = ("is_marlin_converted", "is_triton_converted")
"""Attributes that SGLang sets on layers of experts that are rearranged, and need not be."""


@dataclass(frozen=True)
class _Made:
    """A parameter as ``create_weights`` made it: the object itself, and what rearranging changes of it."""

    parameter: torch.nn.Parameter
    attributes: dict[str, Any]
    shape: torch.Size
    dtype: torch.dtype


@dataclass
class _Layer:
    """``in_use``: by holder (layer, and what computes it) and name, each tensor object and its memory."""

    method: Any
    made: dict[str, _Made]
    in_use: list[tuple[Any, dict[str, tuple[torch.Tensor, torch.Tensor]]]] = field(default_factory=list)
    is_loading: bool = False


_layers: dict[torch.nn.Module, _Layer] = {}
"""Of all models of this process, which live as long as it."""


def process(original: Callable[..., None], method: object, layer: torch.nn.Module) -> None:
    """Around ``process_weights_after_loading``: remember, or put back where the tensors in use are."""
    if getattr(method, "block_quant", False):  # stays as it was loaded
        original(method, layer)
        return
    known = _layers.get(layer)
    if known is None:
        made = {name: _Made(p, dict(vars(p)), p.shape, p.dtype) for name, p in layer.named_parameters(recurse=False)}
        original(method, layer)
        known = _layers[layer] = _Layer(method, made)
        known.in_use = [(holder, {n: (t, t.data) for n, t in _tensors(holder).items()}) for holder in (layer, method)]
        for name, old in made.items():
            if layer._parameters.get(name) is not old.parameter:
                old.parameter.data = old.parameter.data.new_empty(0)  # or its memory would be kept
    elif known.is_loading:
        _check_complete(layer, known)
        original(method, layer)
        for holder, tensors in known.in_use:
            _put_back(holder, tensors)
        known.is_loading = False


def _tensors(holder: object) -> dict[str, torch.Tensor]:
    own = {**vars(holder), **(holder._parameters if isinstance(holder, torch.nn.Module) else {})}
    return {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}


def _put_back(holder: object, tensors: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give the tensors of ``holder`` their old objects and addresses, with the numbers that they have now."""
    now = _tensors(holder)
    for name, (tensor, memory) in tensors.items():
        new = now[name].data
        if new.shape != memory.shape or new.dtype != memory.dtype:
            raise RuntimeError(
                f"{name} was {memory.dtype} {tuple(memory.shape)} and is {new.dtype} {tuple(new.shape)} after a push"
            )
        if new.data_ptr() != memory.data_ptr() or new.stride() != memory.stride():
            shared = new.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
            memory.copy_(new.clone() if shared else new)
        tensor.data = memory
        if isinstance(holder, torch.nn.Module) and name in holder._parameters:
            holder._parameters[name] = tensor  # type: ignore[assignment]
        else:
            setattr(holder, name, tensor)


def prepare(model: torch.nn.Module) -> None:
    """Bring back the parameters that take what checkpoints have, in all layers of ``model`` that were rearranged."""
    for layer in model.modules():
        known = _layers.get(layer)
        if known is None or known.is_loading:
            continue
        in_use = known.in_use[0][1]
        for name, made in known.made.items():
            memory = in_use[name][1] if name in in_use else None
            if memory is not None and not memory.numel():
                continue  # not needed by the kernels, and not in checkpoints either
            made.parameter.data = _of_memory(memory, made, next(m for _, m in in_use.values()).device)
            vars(made.parameter).clear()
            vars(made.parameter).update(made.attributes)
            if made.dtype in (torch.float32, torch.bfloat16, torch.float16):
                made.parameter.data.fill_(torch.nan)  # scales: those that do not come are found by it
            layer._parameters[name] = made.parameter
        for name in _DONE:
            if hasattr(layer, name):
                setattr(layer, name, False)
        known.is_loading = True


def _of_memory(memory: torch.Tensor | None, made: _Made, device: torch.device) -> torch.Tensor:
    needed = made.shape.numel() * made.dtype.itemsize
    if memory is None or memory.storage_offset() or memory.untyped_storage().nbytes() < needed:
        return torch.empty(made.shape, dtype=made.dtype, device=device)
    strides = torch.empty(made.shape, device="meta").stride()
    return torch.empty(0, dtype=made.dtype, device=device).set_(memory.untyped_storage(), 0, made.shape, strides)


def _check_complete(layer: torch.nn.Module, known: _Layer) -> None:
    for name, made in known.made.items():
        numbers = made.parameter.data
        if numbers.is_floating_point() and numbers.element_size() > 1 and bool(numbers.isnan().any()):
            raise RuntimeError(
                f"a push left out {name} {tuple(made.shape)} of {type(layer).__name__}, or brought NaN: layers that "
                "are rearranged after loading need all of their weights in every push"
            )


def prepare_before(update: Callable[..., Any], updater: WeightUpdater, *args: object, **kwargs: object) -> Any:
    """Around the model runner's ``update_weights_from_...``."""
    prepare(updater.get_model())
    return update(updater, *args, **kwargs)


def finish_after(
    update: Callable[..., Any],
    manager: SchedulerWeightUpdaterManager,
    request: UpdateWeightsFromDistributedReqInput | UpdateWeightsFromTensorReqInput,
) -> Any:
    """Around the scheduler's ``update_weights_from_...``: rearrange what came, when the last part has come."""
    reply = update(manager, request)
    if reply.success and request.weight_version is not None:
        try:
            with torch.no_grad():
                for layer, known in list(_layers.items()):
                    if known.is_loading:
                        known.method.process_weights_after_loading(layer)
        except RuntimeError as error:
            reply.success, reply.message = False, str(error)
    return reply


def register(on_cpu: bool) -> None:
    """Register the hooks; warn where the installed SGLang has other layers. On a CPU FP8 stays as it was loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from slime_engine_plugin.hook_points import OtherSGLangError, require

    methods = INT4 if on_cpu else (*INT4, *FP8)
    try:
        for method in methods:
            require(f"{method}.process_weights_after_loading", "self layer")
    except OtherSGLangError as error:
        logging.getLogger(__name__).warning("pushes to INT4 layers do not fit this SGLang: %s", error)
        return
    for method in methods:
        HookRegistry.register(f"{method}.process_weights_after_loading", process, HookType.AROUND)
    for way in ("disk", "distributed", "tensor"):
        HookRegistry.register(f"{_RUNNER}.update_weights_from_{way}", prepare_before, HookType.AROUND)
    for way in ("distributed", "tensor"):  # a load from disk rearranges without this
        HookRegistry.register(f"{_MANAGER}.update_weights_from_{way}", finish_after, HookType.AROUND)
