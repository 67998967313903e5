"""Rank of ``tests/integration/test_trainer_resume.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from slime.backends.megatron_utils.state.offload import torch_optimizers
from tests.support.ranks import error_of, new_trainer
from tests.support.trainer import make_train_data
from tests.support.trainer_ranks import parameters, train_once

RATES: dict[str, dict[str, Any]] = {
    "own": {},
    "new": {"lr": 5e-5, "override_opt_param_scheduler": True},
    "the checkpoint's": {"lr": 5e-5, "use_checkpoint_opt_param_scheduler": True},
}


def _reference(trainer: Any) -> dict[str, torch.Tensor]:
    trainer._backup.save("actor")
    trainer._backup.activate("ref")
    return parameters(trainer)


def resume_options(checkpoint: str, save: str) -> dict[str, Any]:
    """Train two rollouts, saving each without random states, and resume with and without a refreshed reference."""
    trainer, _ = new_trainer(checkpoint, save=save, no_save_rng=True)
    found: dict[str, Any] = {"initial": parameters(trainer)}
    for rollout_id in range(2):
        train_once(trainer, rollout_id, make_train_data(seed=rollout_id))
        trainer.save(rollout_id)
        found[f"after {rollout_id}"] = parameters(trainer)
    trainer, found["start"] = new_trainer(checkpoint, load=save)
    found["resumed"] = parameters(trainer)
    for interval in (1, 2, 3):
        trainer, _ = new_trainer(checkpoint, with_ref=True, load=save, use_kl_loss=True, ref_update_interval=interval)
        found[f"actor, interval {interval}"] = parameters(trainer)
        found[f"reference, interval {interval}"] = _reference(trainer)
    trainer, _ = new_trainer(checkpoint, with_ref=True, load=save, use_kl_loss=True, ref_update_interval=1, ckpt_step=0)
    found["reference of step 0"] = _reference(trainer)
    found["rates"] = {}
    for name, flags in RATES.items():
        trainer, _ = new_trainer(checkpoint, load=save, **flags)
        groups = [group for inner in torch_optimizers(trainer.optimizer) for group in inner.param_groups]
        found["rates"][name] = sorted({(group["max_lr"], group["lr"]) for group in groups})
    found["one layer"] = _one_layer_trained(checkpoint, save + "-of-one-layer")
    return found


def _one_layer_trained(checkpoint: str, save: str) -> dict[str, Any]:
    flags = {"only_train_params_name_list": [r"layers\.1\."], "no_save_rng": True}
    trainer, _ = new_trainer(checkpoint, save=save, **flags)
    found: dict[str, Any] = {"initial": parameters(trainer)}
    train_once(trainer, 0, make_train_data(seed=0))
    trainer.save(0)
    train_once(trainer, 1, make_train_data(seed=1))
    found["went on"] = parameters(trainer)
    resumed, found["start"] = new_trainer(checkpoint, load=save, **flags)
    train_once(resumed, 1, make_train_data(seed=1))
    found["resumed"] = parameters(resumed)
    for name, other in {"all": {}, "the other": {"only_train_params_name_list": [r"layers\.0\."]}}.items():
        flags = {"load": save, "no_save_rng": True, **other}
        found[name] = error_of(lambda flags=flags: new_trainer(checkpoint, **flags), (ValueError, CheckpointException))
    return found
