"""The half-precision weights that need no copy of their own: Megatron's optimiser can write them anew.

With bf16 or fp16 the distributed optimiser holds an fp32 copy of its share of the weights (the master weights) and
after every step rounds it into a flat buffer, which is then gathered over the data-parallel ranks. The same two steps
bring the weights back to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.parallel import gather_from_world

_HALF = (torch.bfloat16, torch.float16)


def rebuildable_buffers(optimizer: Any | None) -> list[Tensor]:
    """Return the flat weight buffers that ``rebuild`` fills; empty unless the masters equal them (collective)."""
    found = [
        buffer.param_data
        for inner in _with_main_params(optimizer)
        for buffer in inner.buffers
        if buffer.param_dtype in _HALF and buffer.param_data is not None
    ]
    return found if _on_every_rank(bool(found) and _mirror(optimizer)) else []


def main_params(optimizer: Any | None) -> Iterator[Tensor]:
    """Yield this rank's master weights."""
    for _, master in _pairs(optimizer):
        yield master


@torch.no_grad()
def rebuild(model: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Write the weights anew from the masters and gather them (collective over the data-parallel ranks)."""
    for inner in _with_main_params(optimizer):
        inner._copy_main_params_to_model_params()
    for chunk in model:
        chunk.start_param_sync(force_sync=True)


def _with_main_params(optimizer: Any | None) -> list[Any]:
    """Return the distributed optimisers inside a Megatron optimiser that hold masters themselves."""
    inner = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one for one in inner if any(getattr(one, "shard_fp32_from_float16_groups", None) or [])]


def _pairs(optimizer: Any | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (this rank's part of a weight, its master)."""
    for inner in _with_main_params(optimizer):
        groups = zip(inner.shard_float16_groups, inner.shard_fp32_from_float16_groups, strict=True)
        yield from (pair for group in groups for pair in zip(*group, strict=True))


def _mirror(optimizer: Any | None) -> bool:
    """Whether the weights are the rounded masters. Somebody may have put others into the model."""
    return all(master is not None and torch.equal(part, master.to(part.dtype)) for part, master in _pairs(optimizer))


def _on_every_rank(mine: bool) -> bool:
    return all(gather_from_world(mine))
