"""Give the trainer's device memory back while the engines generate, without patching the allocator.

A tensor's storage can be resized to zero bytes and later grown again while every view of it stays valid. ``Offloader``
walks over everything a trainer holds (parameters, buffers, gradient buffers, optimizer state), copies each distinct
storage once to host memory, frees it, and brings it back in the same place. Two things are freed without a copy:

* Gradient buffers are restored as zeros: a trainer is offloaded only between optimizer steps, when they hold nothing.
* bf16 and fp16 weights are rounded again from the main parameters, the fp32 copy of its share that the distributed
  optimizer holds, and gathered over the data-parallel ranks, as after every step. They are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.state.host_copy import HostCopy
from slime.backends.megatron_utils.state.parallel import gather_from_world, unwrap

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import ChainedOptimizer

_HALF = (torch.bfloat16, torch.float16)


def rebuildable_buffers(optimizer: Any | None) -> list[Tensor]:
    """Return the flat weight buffers that ``rebuild`` fills; empty unless the masters equal them (collective)."""
    found = [
        buffer.param_data
        for inner in _with_main_params(optimizer)
        for buffer in inner.buffers
        if buffer.param_dtype in _HALF and buffer.param_data is not None
    ]
    return found if all(gather_from_world(bool(found) and _mirror(optimizer))) else []


def main_params(optimizer: Any | None) -> Iterator[Tensor]:
    """Yield this rank's master weights."""
    for _, master in _pairs(optimizer):
        yield master


@torch.no_grad()
def rebuild(model: Sequence[Any], optimizer: ChainedOptimizer) -> None:
    """Write the weights again from the masters and gather them (collective over the data-parallel ranks)."""
    for inner in _with_main_params(optimizer):
        inner._copy_main_params_to_model_params()
    for chunk in model:
        chunk.start_param_sync(force_sync=True)


def _with_main_params(optimizer: Any | None) -> list[Any]:
    """Return the distributed optimizers inside a Megatron optimizer that hold masters themselves."""
    inner = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one for one in inner if any(getattr(one, "shard_fp32_from_float16_groups", None) or [])]


def _pairs(optimizer: Any | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (this rank's part of a weight, its master)."""
    for inner in _with_main_params(optimizer):
        groups = zip(inner.shard_float16_groups, inner.shard_fp32_from_float16_groups, strict=True)
        yield from (pair for group in groups for pair in zip(*group, strict=True))


def _mirror(optimizer: Any | None) -> bool:
    """Return True if the weights are the rounded masters. Others may have been put into the model."""
    return all(master is not None and torch.equal(part, master.to(part.dtype)) for part, master in _pairs(optimizer))


class Offloader:
    """Moves the storages behind ``model`` and ``optimizer`` out of device memory and back.

    The order and the states are the same on every device; on a CPU the copy lands in other host memory. With
    ``copy_rebuildable`` the weights that could be rebuilt get a copy like all others. Every method is collective
    over the ranks.
    """

    def __init__(
        self, model: Sequence[torch.nn.Module], optimizer: Any | None, *, copy_rebuildable: bool = False
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._copy_rebuildable = copy_rebuildable
        self._device = next((p.device.type for chunk in model for p in chunk.parameters()), None)
        self._kept: list[_Kept] = []
        self._emptied: list[_FreedStorage] = []
        self._rebuilt: list[_FreedStorage] = []
        self.offloaded = False

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the copies of an offloaded trainer take, else 0."""
        return sum(kept.host.nbytes for kept in self._kept)

    def offload(self) -> int:
        """Free the storages; return the number of bytes freed. Raises RuntimeError when they are already free."""
        if self.offloaded:
            raise RuntimeError("the trainer is already offloaded: onload() must come before the next offload()")
        rebuilt = _distinct([] if self._copy_rebuildable else rebuildable_buffers(self._optimizer))
        masters = _distinct(main_params(self._optimizer)) if rebuilt else {}
        # fp32 optimizers step the parameters themselves, and gradients may share a buffer with them: each storage once.
        weights = _without(_distinct(_weight_tensors(self._model)), rebuilt)
        state = _without(_distinct(_optimizer_tensors(self._optimizer, self._device)), rebuilt, weights)
        gradients = _without(_distinct(_gradient_tensors(self._model, self._optimizer)), rebuilt, weights, state)
        self._kept = [_Kept(storage, _to_host(storage), is_weight=True) for storage in weights.values()]
        self._kept += [
            _Kept(storage, _to_host(storage), is_master=pointer in masters) for pointer, storage in state.items()
        ]
        self._emptied = [_FreedStorage(storage, storage.nbytes()) for storage in gradients.values()]
        self._rebuilt = [_FreedStorage(storage, storage.nbytes()) for storage in rebuilt.values()]
        _finish_copies(self._kept)
        freed = self.host_bytes + sum(emptied.nbytes for emptied in [*self._emptied, *self._rebuilt])
        for storage in [*weights.values(), *state.values(), *gradients.values(), *rebuilt.values()]:
            storage.resize_(0)
        _return_to_device(self._kept)
        self.offloaded = True
        return freed

    def onload(self) -> None:
        """Grow the storages again and fill them with what they held. Raises RuntimeError when they are not free."""
        if not self.offloaded:
            raise RuntimeError("the trainer is not offloaded: onload() must follow an offload()")
        for emptied in self._emptied:
            emptied.grow()
        self._bring_back(self._kept)
        self._kept, self._emptied, self._rebuilt, self.offloaded = [], [], [], False

    @contextmanager
    def weights_present(self) -> Iterator[None]:
        """Make the weights, and nothing else, readable in the body, also while offloaded. They must not be changed."""
        if not self.offloaded:
            yield
            return
        sources = [kept for kept in self._kept if kept.gives_weights]
        self._bring_back(sources)
        for kept in sources:
            if not kept.is_weight:  # it has done its part
                kept.storage.resize_(0)
        try:
            yield
        finally:
            for storage in [*(kept.storage for kept in sources), *(item.storage for item in self._rebuilt)]:
                storage.resize_(0)
            _return_to_device(sources)

    def _bring_back(self, sources: Sequence[_Kept]) -> None:
        """Fill ``sources``, and what is rebuilt from them."""
        for emptied in self._rebuilt:
            emptied.grow()
        for kept in sources:
            kept.restore()
        _finish_copies(sources)
        if self._rebuilt:
            rebuild(self._model, self._optimizer)


@dataclass(frozen=True)
class _Kept:
    """A freed storage and its content in host memory: weights, what they come from, or neither."""

    storage: torch.UntypedStorage
    host: HostCopy
    is_weight: bool = False
    is_master: bool = False

    @property
    def gives_weights(self) -> bool:
        return self.is_weight or self.is_master

    def restore(self) -> None:
        self.storage.resize_(self.host.nbytes)
        self.host.give(_as_bytes(self.storage))


@dataclass(frozen=True)
class _FreedStorage:
    """A storage that was freed without a copy."""

    storage: torch.UntypedStorage
    nbytes: int

    def grow(self) -> None:
        self.storage.resize_(self.nbytes)
        _as_bytes(self.storage).zero_()


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
        tower = getattr(unwrap(chunk), "tower", None)
        if isinstance(tower, torch.nn.Module):  # of a vision-language model, which is no part of it while it is frozen
            yield from (tensor.data for tensor in (*tower.parameters(), *tower.buffers()))


def _optimizer_tensors(optimizer: Any | None, device: str | None) -> Iterator[Tensor]:
    """Yield parameters and state that are on the model's device: what is offloaded already needs no second copy."""
    for inner in torch_optimizers(optimizer):
        tensors = [parameter.data for group in inner.param_groups for parameter in group["params"]]
        tensors += [v for state in inner.state.values() for v in state.values() if torch.is_tensor(v) and v.dim() > 0]
        yield from (tensor for tensor in tensors if tensor.device.type == device)


def torch_optimizers(optimizer: Any | None) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers inside a Megatron optimizer (chained or not), without empty stubs."""
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


def _without(
    storages: dict[int, torch.UntypedStorage], *others: dict[int, torch.UntypedStorage]
) -> dict[int, torch.UntypedStorage]:
    return {pointer: storage for pointer, storage in storages.items() if not any(pointer in other for other in others)}


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(storage: torch.UntypedStorage) -> HostCopy:
    source = _as_bytes(storage)
    host = HostCopy(source)
    host.take(source)
    return host


def _on_cuda(kept: Sequence[_Kept]) -> bool:
    return any(item.storage.device.type == "cuda" for item in kept)


def _finish_copies(kept: Sequence[_Kept]) -> None:
    if _on_cuda(kept):
        torch.cuda.synchronize()


def _return_to_device(kept: Sequence[_Kept]) -> None:
    """Give freed blocks from torch's cache back, so that another process can have them."""
    if _on_cuda(kept):
        torch.cuda.empty_cache()
