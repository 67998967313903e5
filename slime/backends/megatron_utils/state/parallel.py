"""Position of this process in Megatron's process groups, readable without importing Megatron.

The loss functions and the context-parallel helpers are public and are used by plugins and unit tests in processes
that never load Megatron. There, and before ``initialize_megatron``, every dimension has size one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slime.utils.distributed_utils import control_group


@dataclass(frozen=True)
class Ranks:
    """One parallel dimension as this process sees it: ``rank`` of ``size``, and the process group (None if size 1)."""

    rank: int = 0
    size: int = 1
    group: Any = None


def _parallel_state() -> Any | None:
    state = sys.modules.get("megatron.core.parallel_state")
    return state if state is not None and state.model_parallel_is_initialized() else None


def _ranks(group: dist.ProcessGroup) -> Ranks:
    return Ranks(group.rank(), group.size(), group if group.size() > 1 else None)


def context_parallel() -> Ranks:
    """Return the position in the context-parallel group."""
    state = _parallel_state()
    return _ranks(state.get_context_parallel_group()) if state else Ranks()


def tensor_parallel() -> Ranks:
    """Return the position in the tensor-parallel group."""
    state = _parallel_state()
    return _ranks(state.get_tensor_model_parallel_group()) if state else Ranks()


def expert_parallel() -> Ranks:
    """Return the position in the expert-parallel group: rank ``r`` holds the ``r``-th block of a layer's experts."""
    state = _parallel_state()
    return _ranks(state.get_expert_model_parallel_group()) if state else Ranks()


def expert_tensor_parallel() -> Ranks:
    """Return the position in the group over which one routed expert is split."""
    state = _parallel_state()
    return _ranks(state.get_expert_tensor_parallel_group()) if state else Ranks()


def pipeline_parallel() -> Ranks:
    """Return the position in the pipeline-parallel group."""
    state = _parallel_state()
    return _ranks(state.get_pipeline_model_parallel_group()) if state else Ranks()


def data_parallel(*, with_context_parallel: bool = False) -> Ranks:
    """Return the position in the data-parallel group; with ``with_context_parallel`` in the DP x CP group."""
    state = _parallel_state()
    return _ranks(state.get_data_parallel_group(with_context_parallel=with_context_parallel)) if state else Ranks()


def all_gather_objects(value: object, ranks: Ranks | None = None) -> list[Any]:
    """Return the picklable ``value`` of each of ``ranks`` (default: DP x CP) in their order (collective over them)."""
    ranks = data_parallel(with_context_parallel=True) if ranks is None else ranks
    if ranks.size == 1:
        return [value]
    gathered: list[Any] = [None] * ranks.size
    dist.all_gather_object(gathered, value, group=ranks.group)
    return gathered


def gather_from_world(value: object) -> list[Any]:
    """Return the picklable ``value`` of every process of the trainer, in order of ranks (collective)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value, group=control_group())
    return gathered


def first_error(message: str | None) -> str | None:
    """Return the message of the first process that has one, on all of them (collective).

    What fails on one rank must raise on all, in the same place: the others would wait for it forever.
    """
    return next((text for text in gather_from_world(message) if text is not None), None)


def is_last_stage() -> bool:
    """Return whether this process holds the last pipeline stage (the one with logits)."""
    pp = pipeline_parallel()
    return pp.rank == pp.size - 1


def is_main_rank() -> bool:
    """Return whether this is the one rank that reports metrics: last stage, first of every other dimension."""
    return is_last_stage() and tensor_parallel().rank == 0 and data_parallel(with_context_parallel=True).rank == 0


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside ``DistributedDataParallel`` and ``Float16Module``."""
    model: Any = chunk
    while hasattr(model, "module"):
        model = model.module
    return model
