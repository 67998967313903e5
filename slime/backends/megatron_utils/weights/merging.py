"""Weights with their low-rank adapters merged in (``--lora-rank``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from slime.backends.megatron_utils.state.parallel import unwrap

ADAPTER = "adapter"
"""The name of the module below a linear layer: ``linear_qkv.adapter.q_proj.lora_A``."""


def merging(model: Sequence[torch.nn.Module]) -> dict[int, Callable[[Tensor], Tensor]]:
    """Return how the adapter is merged into a weight, by the ``id`` of the weights that have one."""
    found: dict[int, Callable[[Tensor], Tensor]] = {}
    for chunk in model:
        for linear in unwrap(chunk).modules():
            adapter = getattr(linear, ADAPTER, None)
            if adapter is None or not hasattr(adapter, "merged"):  # a module of a user's model may have this name, too
                continue
            for name, weight in linear.named_parameters(recurse=False):
                if name == "weight":
                    found[id(weight)] = adapter.merged
                elif (number := name.removeprefix("weight")).isdigit():
                    found[id(weight)] = partial(adapter.merged, expert=int(number))
    return found
