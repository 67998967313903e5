"""Ranks of runs that train no policy: they load, compute, push and offload with weights alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.support.ranks import error_of, new_trainer, same_tensors
from tests.support.trainer import make_train_data
from tests.support.trainer_ranks import hf_weights, parameters, train_once

CANARY = [7, 3, 200, 3, 11, 90, 91, 92, 93, 250, 1]


def compare(checkpoint: str, folder: str, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per layout: a checkpoint without optimizer state in a run that trains and in one that does not."""
    found = []
    for number, layout in enumerate(layouts):
        save = f"{folder}/{number}"
        trainer, _ = new_trainer(checkpoint, load=checkpoint, save=save, no_save_optim=True, **layout)
        train_once(trainer, 0, make_train_data(seed=0))
        trainer.save(0, force_sync=True)
        expected = trainer.canary(CANARY), hf_weights(trainer.model, trainer.args)
        flags = {"num_rollout": 0, "use_kl_loss": True, "keep_old_actor": True}
        alone, start = new_trainer(checkpoint, load=save, **flags, **layout)
        seen = _of(alone, expected)
        kinds = (RuntimeError, ValueError)
        seen["start"], train = start, partial(train_once, alone, 1, make_train_data(seed=1))
        seen["refusal"] = error_of(train, kinds)
        seen["resumed"] = error_of(partial(new_trainer, checkpoint, load=save, **layout), kinds)
        fresh, _ = new_trainer(checkpoint, load=None, num_rollout=0, **layout)
        last_stage = expected[0] is not None
        seen["fresh start"] = fresh.optimizer is None and (fresh.canary(CANARY) != expected[0]) == last_stage
        found.append(seen)
    return found


def _of(trainer: Any, expected: tuple[Any, dict[str, torch.Tensor]]) -> dict[str, Any]:
    tensors = [p for chunk in trainer.model for p in chunk.parameters()]
    seen: dict[str, Any] = {
        "optimizer": trainer.optimizer,
        "scheduler": trainer.scheduler,
        "gradient buffers": sum(hasattr(p, "main_grad") for p in tensors),
        "policies on the host": trainer._backup.tags,
        "log-probs": trainer.canary(CANARY) == expected[0],
        "weights": same_tensors(hf_weights(trainer.model, trainer.args), expected[1]),
    }
    before = parameters(trainer)
    trainer.offload()
    seen["bytes asleep"] = sum(p.untyped_storage().nbytes() for p in tensors)
    with trainer.weights_present():
        seen["weights asleep"] = same_tensors(hf_weights(trainer.model, trainer.args), expected[1])
    trainer.onload()
    seen["awake"] = same_tensors(parameters(trainer), before)
    return seen


def others(checkpoint: str, folder: str) -> dict[str, Any]:
    """Adapters that are evaluated, and an actor whose critic alone is trained."""
    found: dict[str, Any] = {}
    lora = {"lora_rank": 4, "lora_alpha": 8, "lora_target_modules": ["all-linear"], "ref_load": checkpoint}
    trainer, _ = new_trainer(checkpoint, save=f"{folder}/lora", no_save_optim=True, **lora)
    train_once(trainer, 0, make_train_data(seed=0))
    trainer.save(0, force_sync=True)
    expected = trainer.canary(CANARY)
    alone, found["start"] = new_trainer(checkpoint, load=f"{folder}/lora", num_rollout=0, **lora)
    found["adapters"] = alone.optimizer is None and alone.canary(CANARY) == expected
    ppo = {"advantage_estimator": "ppo", "use_critic": True}
    for steps, name in ((7, "some"), (8, "all")):
        actor, _ = new_trainer(checkpoint, **ppo, num_critic_only_steps=steps)
        found[f"critic alone in {name}"] = actor.optimizer is None
    return found
