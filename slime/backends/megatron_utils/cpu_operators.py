"""Operators that megatron leaves to torch.compile or to a CUDA kernel, for a CPU: few passes and little new memory.

They replace megatron's own of the same name; see ``cpu_adapter.adapt_imported_megatron``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def swiglu(y: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` [..., n] of ``y = [gate, up]`` [..., 2n]."""
    gate, up = y.chunk(2, -1)
    return F.silu(gate).mul_(up)


def swiglu_back(g: Tensor, y: Tensor) -> Tensor:
    """Return the gradient [..., 2n] of ``swiglu(y)`` for the gradient ``g`` [..., n] of its result."""
    gate, up = y.chunk(2, -1)
    grad = torch.empty_like(y)
    grad_gate, grad_up = grad.chunk(2, -1)
    torch.mul(g, F.silu(gate), out=grad_up)
    torch.ops.aten.silu_backward.grad_input(g * up, gate, grad_input=grad_gate)
    return grad


def among_several(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``collective(output, input, group=..., ...)`` (an all-gather or reduce-scatter) that skips groups of one.

    Gloo copies the tensor back and forth for a single rank; NCCL knows better.
    """

    def call(output: Tensor, input_: Tensor, **options: Any) -> Any:
        if options["group"].size() > 1:
            return collective(output, input_, **options)
        if output.data_ptr() != input_.data_ptr():
            output.copy_(input_)
        return None

    return call
