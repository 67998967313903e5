"""Plans of where the elements of Hugging Face tensors go in the memory of one engine rank.

The trainer's tensors are numbered, and a rank's plan is a list of pieces of them. A piece knows nothing of addresses:
ranks that are laid out alike have equal ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch._ops import OpOverload

    class LoadableModel(torch.nn.Module):
        """A model of SGLang."""

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
            """Load tensors of the Hugging Face checkpoint by name."""
            ...


aten = torch.ops.aten
_FILLS = (aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default)


class Piece(NamedTuple):
    """A block of elements of one tensor, in the order in which they lie in the memory of one parameter.

    Attributes:
        tensor: number of the tensor.
        parameter: the engine's name.
        shape: of the block; dimensions of one element are left out, and those that can be seen as one are joined.
        source: strides in the tensor, in elements; 0 where an element goes to several places.
        source_start: the block's first element in the tensor.
        target: strides in the parameter's memory, in elements, descending.
        target_start: the block's first element there.
    """

    tensor: int
    parameter: str
    shape: tuple[int, ...]
    source: tuple[int, ...]
    source_start: int
    target: tuple[int, ...]
    target_start: int

    @classmethod
    def of_copy(cls, tensor: int, parameter: str, target: torch.Tensor, source: torch.Tensor) -> Piece:
        """Return what ``target.copy_(source)`` copies: views of the parameter's memory and of the tensor."""
        source = source.expand(target.shape)
        dims = [
            (place, size, stride)
            for size, place, stride in zip(target.shape, target.stride(), source.stride(), strict=True)
            if size > 1
        ]
        joined: list[tuple[int, int, int]] = []
        for place, size, stride in sorted(dims, key=lambda dim: -dim[0]):
            if joined and joined[-1][0] == size * place and joined[-1][2] == size * stride:
                joined[-1] = (place, size * joined[-1][1], stride)
            else:
                joined.append((place, size, stride))
        places, shape, strides = zip(*joined, strict=True) if joined else ((), (), ())
        first, start = int(source.storage_offset()), int(target.storage_offset())
        return cls(tensor, parameter, shape, strides, first, places, start)

    @classmethod
    def of_json(cls, fields: Sequence[Any]) -> Piece:
        """Return the piece that JSON has made a list of."""
        return cls._make(tuple(field) if isinstance(field, list) else field for field in fields)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def pack(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the elements of ``tensor``, contiguous and of full shape, as the parameter of ``dtype`` has them.

        uint8 [numel * bytes of an element].
        """
        whole = tensor.detach().contiguous()
        block = whole.as_strided(self.shape, self.source, whole.storage_offset() + self.source_start)
        return as_bytes(block.to(dtype))

    def unpack(self, memory: torch.Tensor) -> torch.Tensor:
        """Return what ``memory``, any view of the parameter's memory, holds of this piece: uint8, as ``pack`` does."""
        return as_bytes(memory.as_strided(self.shape, self.target, self.target_start))

    def runs(self, itemsize: int) -> Iterator[tuple[int, int]]:
        """Yield ``(first byte in the parameter's memory, bytes)`` of what lies together, in the order of ``pack``."""
        outer, run = len(self.shape), 1
        while outer and self.target[outer - 1] == run:
            outer -= 1
            run *= self.shape[outer]
        for index in itertools.product(*(range(size) for size in self.shape[:outer])):
            start = self.target_start + sum(i * stride for i, stride in zip(index, self.target, strict=False))
            yield start * itemsize, run * itemsize


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in order as uint8, on the host."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()


# Learn from a model's own load_weights where it puts what it loads. It is given tensors without content (device meta),
# which keep their strides through the views that loaders make: names, fused layers, tensor-parallel shards and experts.
# Where a view of one is copied into the model, both sides are noted, and nothing is copied. What cannot be traced in
# this way is refused with the name of the parameter: content that is computed from a tensor or a parameter, elements
# that are not loaded, and those that are loaded twice.


class RefusedError(Exception):
    """The model cannot be written to from outside."""


@dataclass(frozen=True)
class _Memory:
    """The memory of a parameter or buffer, or of several that share it.

    ``name`` and ``dtype`` of the first of them; ``parameters`` with their names; what loading does with it.
    """

    name: str
    dtype: torch.dtype
    storage: torch.UntypedStorage
    parameters: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    constants: list[torch.Tensor] = field(default_factory=list)


@torch.no_grad()
def trace(model: LoadableModel, tensors: Sequence[tuple[str, Sequence[int], str]]) -> list[Piece]:
    """Return the plan of this rank for ``tensors``: ``(name, shape, dtype)`` of all that are sent, in their order.

    Every element of every parameter is in exactly one piece, or is one that loading fills with a constant. The model is
    left as it was. Raises RefusedError.
    """
    sources = [torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta") for _, shape, dtype in tensors]
    recording = _Recording(model, sources)
    before = list(_holders(model))
    try:
        with recording:
            model.load_weights((name, source) for (name, _, _), source in zip(tensors, sources, strict=True))
    except RefusedError:
        raise
    except Exception as e:
        raise RefusedError(f"{type(model).__name__} looks into what it loads ({type(e).__name__}: {e})") from e
    finally:
        replaced = _restore(before)
    if replaced is not None:
        raise RefusedError(f"{replaced} is replaced when weights are loaded")
    for memory in recording.memory.values():
        _check_complete(memory)
    return [piece for memory in recording.memory.values() for piece in memory.pieces]


class _Recording(TorchDispatchMode):
    """Notes what is copied into the memory of ``model``, and lets nothing be written or read there."""

    def __init__(self, model: torch.nn.Module, sources: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.memory: dict[int, _Memory] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.numel():
                storage = tensor.untyped_storage()
                memory = self.memory.setdefault(storage.data_ptr(), _Memory(name, tensor.dtype, storage))
                if isinstance(tensor, torch.nn.Parameter):
                    memory.parameters.append((name, tensor.data))
        self._numbers = {source.untyped_storage()._cdata: number for number, source in enumerate(sources)}

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.copy_.default and (memory := self._memory(args[0])) is not None:
            self._note(memory, args[0], args[1])
            return args[0]
        if func in _FILLS and (memory := self._memory(args[0])) is not None:
            memory.constants.append(args[0])
            return args[0]
        keeps_values = func is aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype)
        if keeps_values and self._number(args[0]) is not None:  # to another device, as the copy into the model does
            return args[0].detach()
        if not _is_view(func):
            self._check(func, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])
        return func(*args, **kwargs)

    def _check(self, func: OpOverload, tensors: Sequence[torch.Tensor]) -> None:
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        for tensor in tensors:
            if (memory := self._memory(tensor)) is not None:
                raise RefusedError(f"{memory.name} is read or computed when weights are loaded ({func})")
            if writes and self._number(tensor) is not None:
                raise RefusedError(f"weights are computed with before they are loaded ({func})")

    def _memory(self, tensor: torch.Tensor) -> _Memory | None:
        return None if tensor.device.type == "meta" else self.memory.get(tensor.untyped_storage().data_ptr())

    def _number(self, tensor: torch.Tensor) -> int | None:
        return self._numbers.get(tensor.untyped_storage()._cdata) if tensor.device.type == "meta" else None

    def _note(self, memory: _Memory, target: torch.Tensor, source: torch.Tensor) -> None:
        number = self._number(source)
        if number is None:
            raise RefusedError(f"{memory.name} is loaded with what is computed from the trainer's tensors")
        if target.dtype != memory.dtype or not target.dtype.is_floating_point or target.element_size() == 1:
            raise RefusedError(f"{memory.name} ({memory.dtype}) is loaded as {target.dtype}: it is quantized")
        if target.numel():
            memory.pieces.append(Piece.of_copy(number, memory.name, target, source))


def _is_view(func: OpOverload) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


Holder = tuple[str, dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]
"""A module's name, a dictionary of its attributes, a copy of it, and the memory of the tensors in it."""


def _holders(model: torch.nn.Module) -> Iterator[Holder]:
    for prefix, module in model.named_modules():
        for attributes in (vars(module), module._parameters, module._buffers):
            memory = {name: value.data for name, value in attributes.items() if isinstance(value, torch.Tensor)}
            yield prefix, attributes, dict(attributes), memory


def _restore(before: Sequence[Holder]) -> str | None:
    """Put back tensors that have been replaced; return the name of one."""
    replaced = None
    for prefix, now, old, memory in before:
        for name in [*now]:
            value, data = now[name], memory.get(name)
            moved = data is not None and (value is not old[name] or value.data_ptr() != data.data_ptr())
            if moved or (data is None and isinstance(value, torch.Tensor)):
                replaced = f"{prefix}.{name}".lstrip(".")
                now[name] = old.get(name)
            if data is not None and now[name].data_ptr() != data.data_ptr():
                now[name].data = data
    return replaced


def _check_complete(memory: _Memory) -> None:
    """Raise RefusedError unless every element is loaded once, of parameters and of a buffer that is loaded at all."""
    seen = torch.zeros(memory.storage.nbytes() // memory.dtype.itemsize, dtype=torch.bool, device=memory.storage.device)
    for piece in memory.pieces:
        block = seen.as_strided(piece.shape, piece.target, piece.target_start)
        if bool(block.any()):
            raise RefusedError(f"{memory.name} has elements that are loaded twice")
        block.fill_(True)
    for filled in memory.constants:
        seen.as_strided(filled.shape, filled.stride(), filled.storage_offset()).fill_(True)
    for name, tensor in memory.parameters:
        if not bool(seen.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).all()):
            raise RefusedError(f"{name} has elements that none of the trainer's tensors is loaded into")
    if not memory.parameters and memory.pieces and not bool(seen.all()):
        raise RefusedError(f"{memory.name} has elements that none of the trainer's tensors is loaded into")
