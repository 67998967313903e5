"""Cut a stream of named tensors into buckets of at most a given size, and flatten a bucket into one byte tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

_FIRST_HALF, _SECOND_HALF = ".q_a_proj.", ".kv_a_proj_with_mqa."


@dataclass(frozen=True)
class TensorSlot:
    """Place of one tensor in a flattened bucket: ``[start_idx, end_idx)`` counts bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int


@dataclass(frozen=True)
class Bucket:
    """Named tensors that travel together, widest dtype first so that every slot starts aligned for its dtype."""

    tensors: tuple[tuple[str, torch.Tensor], ...]
    is_last: bool

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.tensors]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for _, t in self.tensors)

    def slots(self) -> list[TensorSlot]:
        """Return the byte layout of ``flatten()``, in order."""
        slots, start = [], 0
        for name, tensor in self.tensors:
            end = start + tensor.numel() * tensor.element_size()
            slots.append(TensorSlot(name, tensor.shape, tensor.dtype, start, end))
            start = end
        return slots

    def flatten(self) -> torch.Tensor:
        """Return all tensors as one contiguous uint8 tensor of shape ``[nbytes]``."""
        parts = [t.detach().contiguous().flatten().view(torch.uint8) for _, t in self.tensors]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def iter_buckets(named_tensors: Iterable[tuple[str, torch.Tensor]], limit_bytes: int) -> Iterator[Bucket]:
    """Yield buckets of at most ``limit_bytes`` (a larger tensor travels alone), the last one marked ``is_last``.

    The order of tensors is kept but for the sort by dtype inside a bucket, and for tensors that must not be parted:
    they travel in one bucket, as if they were one tensor. An empty stream yields nothing.
    """
    if limit_bytes <= 0:
        raise ValueError(f"--update-weight-buffer-size must be positive, got {limit_bytes}")
    held: list[tuple[str, torch.Tensor]] = []
    size = 0
    for together in kept_together(named_tensors):
        nbytes = sum(tensor.numel() * tensor.element_size() for _, tensor in together)
        if held and size + nbytes > limit_bytes:
            yield _bucket(held, is_last=False)
            held, size = [], 0
        held += together
        size += nbytes
    if held:
        yield _bucket(held, is_last=True)


def kept_together(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield tensors one by one; the halves of what an engine fuses within one request together, with the second one.

    SGLang joins the latent projections of queries and keys when it has seen both, and forgets a half whose other half
    is not in the same request: the old weights would silently stay. Of the up-projection of keys and values it makes
    other weights after every request: in FP8 with the scales that it has by then.
    """
    waiting: dict[str, tuple[str, torch.Tensor]] = {}
    for name, tensor in named_tensors:
        first = waiting.pop(name, None)
        if first is not None:
            yield [first, (name, tensor)]
        elif _FIRST_HALF in name:
            waiting[name.replace(_FIRST_HALF, _SECOND_HALF)] = (name, tensor)
        elif name.endswith(".kv_b_proj.weight") and tensor.element_size() == 1:
            waiting[f"{name}_scale_inv"] = (name, tensor)
        else:
            yield [(name, tensor)]
    yield from ([half] for half in waiting.values())


def _bucket(tensors: list[tuple[str, torch.Tensor]], *, is_last: bool) -> Bucket:
    return Bucket(tuple(sorted(tensors, key=lambda item: -item[1].element_size())), is_last)
