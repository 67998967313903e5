"""Shared steps of the functions that ``tests.support.distributed`` runs on ranks: layouts, models, trainers, errors.

The launcher starts the processes, passes arguments, returns results and reports failures. Nothing of Megatron is
imported before the first call: see ``tests.support.float64``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.trainer import trainer_args


def take_down_layout() -> None:
    """Destroy Megatron's groups of an earlier layout of this process, if any."""
    from slime.backends.megatron_utils import import_megatron

    import_megatron()
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def switch_layout(args: Namespace) -> None:
    """Initialize Megatron for the parallel sizes of ``args``, taking down an earlier layout of this process."""
    from slime.backends.megatron_utils.initialize import initialize_megatron

    take_down_layout()
    initialize_megatron(args)


def loaded_model(args: Namespace, weights: str | Path, *, ddp: bool = True) -> list[torch.nn.Module]:
    """Build the model of ``args`` in the present layout and load the Hugging Face checkpoint ``weights``."""
    from slime.backends.megatron_utils.model.provider import get_model
    from slime.backends.megatron_utils.weights import load_hf

    model: list[torch.nn.Module] = get_model(args, wrap_with_ddp=ddp)
    load_hf(model, weights, args)
    return model


def new_trainer(
    checkpoint: str | Path, *, role: str = "actor", with_ref: bool = False, **overrides: Any
) -> tuple[Any, int]:
    """Return (trainer, first rollout id) on this rank, after taking down the layout of an earlier one."""
    from slime.backends.megatron_utils.train.trainer import CriticTrainer, MegatronTrainer

    take_down_layout()
    args = trainer_args(checkpoint, **overrides)
    trainer = CriticTrainer(args) if role == "critic" else MegatronTrainer(args, with_ref=with_ref)
    return trainer, trainer.initialize()


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return True if names and bits are equal."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return the tensors as arrays: files with tensors store the wrong name for float64 here."""
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


def error_of(action: Callable[[], Any], kinds: type[Exception] | tuple[type[Exception], ...] = ValueError) -> str:
    """Return type and text of the exception of ``kinds`` that ``action`` raises."""
    try:
        action()
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
