"""The type of what ``torch.autograd.Function`` passes to ``forward`` and ``backward``."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Context(Protocol):
    """``ctx``: keeps tensors of the forward pass for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep ``tensors``, which become ``saved_tensors``."""
        ...
