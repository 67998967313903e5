"""Random states in checkpoints: stored per position of the layout, restored under the same layout alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from slime.backends.megatron_utils.state.parallel import data_parallel, pipeline_parallel, tensor_parallel


def layout() -> list[int]:
    """Return the number of ranks by dimension: states are stored per (pp, tp, dp) position and fit this layout only."""
    return [pipeline_parallel().size, tensor_parallel().size, data_parallel(with_context_parallel=True).size]


def saved_layout(common: dict[str, Any]) -> list[int] | None:
    """Return ``layout`` of the run that wrote the checkpoint with this common part; None without random states."""
    return common.get("slime_layout")


def copy_number() -> int:
    """Return this rank's number among those that hold the same part of the model."""
    return data_parallel(with_context_parallel=True).rank


def rng_state() -> Any:
    """Return this rank's random states as a sharded object, by its position in the layout."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    pp, tp, dp = pipeline_parallel(), tensor_parallel(), data_parallel(with_context_parallel=True)
    return ShardedObject(
        "slime_rng_state",
        own_rng_state(),
        (pp.size, tp.size, dp.size),
        (pp.rank, tp.rank, dp.rank),
        replica_id=0,
    )


def own_rng_state() -> dict[str, Any]:
    """Return the random states of this process."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }


def restore_rng(states: dict[str, Any]) -> None:
    """Set the random states of Python, NumPy, torch and Megatron's tracker to ``states``."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    random.setstate(states["random_rng_state"])
    np.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    torch.cuda.set_rng_state(states["cuda_rng_state"])
    get_cuda_rng_tracker().set_states(states["rng_tracker_states"])
