"""Give the trainer's device memory back while the engines generate, without patching the allocator.

A tensor's storage can be resized to zero bytes and later grown again while every view of it stays valid. ``Sleeper``
walks over everything a trainer holds (parameters, buffers, gradient buffers, optimiser state), copies each distinct
storage once to host memory, frees it, and brings it back in the same place. Gradient buffers are freed without a
copy and come back zeroed: a trainer sleeps only between optimiser steps, when they hold nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Sleeper:
    """Moves the storages behind ``model`` and ``optimizer`` out of device memory and back.

    The order and the states are the same on every device; on a CPU the copy lands in other host memory.
    """

    def __init__(self, model: Sequence[torch.nn.Module], optimizer: Any | None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._kept: list[_Kept] = []
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []
        self.asleep = False

    def sleep(self) -> int:
        """Free the storages; return the number of bytes freed. Raises RuntimeError when already asleep."""
        if self.asleep:
            raise RuntimeError("the trainer is already asleep: wake_up() must come before the next sleep()")
        weights = _distinct(_weight_tensors(self._model))
        state = _distinct(_optimizer_tensors(self._optimizer))
        gradients = _distinct(_gradient_tensors(self._model, self._optimizer))
        # fp32 optimisers step the parameters themselves, and gradients may share a buffer with them: each storage once.
        state = {pointer: storage for pointer, storage in state.items() if pointer not in weights}
        gradients = {p: storage for p, storage in gradients.items() if p not in weights and p not in state}
        self._kept = [_Kept(storage, _to_host(storage), is_weight=True) for storage in weights.values()]
        self._kept += [_Kept(storage, _to_host(storage), is_weight=False) for storage in state.values()]
        self._emptied = [(storage, storage.nbytes()) for storage in gradients.values()]
        _finish_copies(self._kept)
        freed = sum(kept.host.numel() for kept in self._kept) + sum(size for _, size in self._emptied)
        for storage in [*weights.values(), *state.values(), *gradients.values()]:
            storage.resize_(0)
        _return_to_device(self._kept)
        self.asleep = True
        return freed

    def wake_up(self) -> None:
        """Grow the storages again and fill them with what they held. Raises RuntimeError when not asleep."""
        if not self.asleep:
            raise RuntimeError("the trainer is not asleep: wake_up() must follow a sleep()")
        for kept in self._kept:
            kept.restore()
        for storage, size in self._emptied:
            storage.resize_(size)
            _as_bytes(storage).zero_()
        _finish_copies(self._kept)
        self._kept, self._emptied, self.asleep = [], [], False

    @contextmanager
    def weights_present(self) -> Iterator[None]:
        """Make the weights, and nothing else, readable in the body, also while asleep. They must not be changed."""
        if not self.asleep:
            yield
            return
        weights = [kept for kept in self._kept if kept.is_weight]
        for kept in weights:
            kept.restore()
        _finish_copies(weights)
        try:
            yield
        finally:
            for kept in weights:
                kept.storage.resize_(0)
            _return_to_device(weights)


@dataclass(frozen=True)
class _Kept:
    """A freed storage and its content in host memory (uint8)."""

    storage: torch.UntypedStorage
    host: Tensor
    is_weight: bool

    def restore(self) -> None:
        self.storage.resize_(self.host.numel())
        _as_bytes(self.storage).copy_(self.host, non_blocking=True)


def _gradient_tensors(model: Sequence[torch.nn.Module], optimizer: Any | None) -> Iterator[Tensor]:
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    for inner in torch_optimizers(optimizer):
        parameters += [parameter for group in inner.param_groups for parameter in group["params"]]
    for parameter in parameters:
        for gradient in (parameter.grad, getattr(parameter, "main_grad", None)):
            if gradient is not None:
                yield gradient
    for chunk in model:
        yield from (buffer.grad_data for buffer in _ddp_buffers(chunk))


def _weight_tensors(model: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    for chunk in model:
        yield from (parameter.data for parameter in chunk.parameters())
        yield from (buffer for _, buffer in chunk.named_buffers())
        yield from (buffer.param_data for buffer in _ddp_buffers(chunk) if buffer.param_data is not None)


def _optimizer_tensors(optimizer: Any | None) -> Iterator[Tensor]:
    for inner in torch_optimizers(optimizer):
        for group in inner.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for state in inner.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value) and value.dim() > 0)


def torch_optimizers(optimizer: Any | None) -> list[torch.optim.Optimizer]:
    """Return the torch optimisers inside a Megatron optimiser (chained or not), without empty stubs."""
    if optimizer is None:
        return []
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts if getattr(part, "optimizer", None) is not None]


def _ddp_buffers(chunk: torch.nn.Module) -> list[Any]:
    # Megatron's DDP keeps its contiguous buffers in attributes, one of which hides nn.Module.buffers().
    found: list[Any] = []
    for name in ("buffers", "expert_parallel_buffers"):
        value = chunk.__dict__.get(name)
        found += value if isinstance(value, list) else []
    return found


def _distinct(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the non-empty storages behind ``tensors`` by address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(storage: torch.UntypedStorage) -> Tensor:
    source = _as_bytes(storage)
    host = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=source.is_cuda)
    return host.copy_(source, non_blocking=True)


def _on_cuda(kept: Sequence[_Kept]) -> bool:
    return any(item.storage.device.type == "cuda" for item in kept)


def _finish_copies(kept: Sequence[_Kept]) -> None:
    if _on_cuda(kept):
        torch.cuda.synchronize()


def _return_to_device(kept: Sequence[_Kept]) -> None:
    """Give freed blocks from torch's cache back, so that another process can have them."""
    if _on_cuda(kept):
        torch.cuda.empty_cache()
