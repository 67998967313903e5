"""Ranks of the tests of conversions."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.megatron_model import model_args
from tests.support.model_families import LAYOUTS
from tests.support.ranks import error_of, loaded_model, new_trainer, switch_layout


def save_all(checkpoints: dict[str, str], cases: dict[str, tuple[str, ...]]) -> None:
    """Load each checkpoint under its layouts and save it as a trainer does, to ``<checkpoint>-<layout>``."""
    from slime.backends.megatron_utils.checkpoints.save_load import CheckpointSaver, TrainerState

    for name, layouts in cases.items():
        for layout in layouts:
            checkpoint = checkpoints[name]
            mtp = ("--mtp-num-layers", 1) if "predicting" in name else ()
            args = model_args(checkpoint, "--save", f"{checkpoint}-{layout}", *mtp, *LAYOUTS[layout])
            switch_layout(args)
            CheckpointSaver(args).save(3, TrainerState(loaded_model(args, checkpoint)))


def load(checkpoint: str, root: str, *flags: Any) -> dict[str, torch.Tensor]:
    """Build the model of ``checkpoint``, load the Megatron checkpoint under ``root``, and return all weights."""
    from slime.backends.megatron_utils.checkpoints.save_load import TrainerState, load_checkpoint
    from slime.backends.megatron_utils.model.provider import get_model
    from tests.support.trainer_ranks import hf_weights

    args = model_args(checkpoint, *flags)
    switch_layout(args)
    model = get_model(args)
    load_checkpoint(args, root, TrainerState(model), weights_only=True)
    return hf_weights(model, args)


def load_all(checkpoints: dict[str, str], cases: dict[str, tuple[str, ...]]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights of the Megatron checkpoint ``<checkpoint>-torch_dist`` by ``<name>-<layout>``."""
    found = {}
    for name, layouts in cases.items():
        for layout in layouts:
            mtp = ("--mtp-num-layers", 1) if "predicting" in name else ()
            loaded = load(checkpoints[name], f"{checkpoints[name]}-torch_dist", *mtp, *LAYOUTS[layout])
            found[f"{name}-{layout}"] = loaded
    return found


def start(checkpoint: str, root: str) -> tuple[str, int, dict[str, torch.Tensor]]:
    """Start a trainer with ``--load`` of weights alone; return what is said without --no-load-optim, and with it
    the first rollout and the weights."""
    from tests.support.trainer_ranks import hf_weights

    refused = error_of(lambda: new_trainer(checkpoint, load=root))
    trainer, first = new_trainer(checkpoint, load=root, no_load_optim=True)
    return refused, first, hf_weights(trainer.model, trainer.args)
