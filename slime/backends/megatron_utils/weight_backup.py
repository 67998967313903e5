"""Copies of the model's weights in host memory, by tag, so that one model on the device can play several roles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def _named_tensors(model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers of all chunks under unique names."""
    for index, chunk in enumerate(model):
        for name, parameter in chunk.named_parameters():
            yield f"{index}.{name}", parameter
        for name, buffer in chunk.named_buffers():
            yield f"{index}.{name}", buffer


class WeightBackup:
    """Host copies of ``model`` (a list of chunks) under tags such as ``actor`` and ``ref``.

    ``active`` is the tag whose weights are in the model now. On CUDA the copies are pinned and the transfers overlap.
    """

    def __init__(self, model: Sequence[torch.nn.Module], active: str) -> None:
        self._model = model
        self._copies: dict[str, dict[str, Tensor]] = {}
        self.active = active

    @property
    def tags(self) -> list[str]:
        """The tags that have a copy."""
        return list(self._copies)

    @property
    def host_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(tensor.nbytes for copies in self._copies.values() for tensor in copies.values())

    def forget_active(self) -> None:
        """Give back the copy of the weights that are in the model, if there is one. ``save`` makes it again."""
        self._copies.pop(self.active, None)

    @torch.no_grad()
    def save(self, tag: str) -> None:
        """Copy the weights that are in the model now to host memory as ``tag`` (overwrites an earlier copy)."""
        copies = self._copies.setdefault(tag, {})
        for name, tensor in _named_tensors(self._model):
            if name not in copies:
                copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            copies[name].copy_(tensor, non_blocking=True)
        _wait_for_copies(self._model)

    @torch.no_grad()
    def activate(self, tag: str) -> None:
        """Put the weights ``tag`` into the model. No-op if they are there. Raises KeyError for a tag without a copy."""
        if tag == self.active:
            return
        if tag not in self._copies:
            raise KeyError(f"no weights were kept under the tag {tag!r}; there are {sorted(self._copies)}")
        for name, tensor in _named_tensors(self._model):
            tensor.copy_(self._copies[tag][name], non_blocking=True)
        _wait_for_copies(self._model)
        self.active = tag

    @torch.no_grad()
    def copy(self, source: str, target: str) -> None:
        """Make the copy ``target`` equal to the copy ``source``."""
        for name, tensor in self._copies[source].items():
            self._copies[target][name].copy_(tensor)


def _wait_for_copies(model: Sequence[torch.nn.Module]) -> None:
    """Block until asynchronous device/host copies are done (CPU copies are already)."""
    if any(parameter.is_cuda for chunk in model for parameter in chunk.parameters()):
        torch.cuda.synchronize()
