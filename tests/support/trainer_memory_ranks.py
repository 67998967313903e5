"""Ranks of the tests of memory: an optimizer without moments, and offloading. One launch runs all of it."""

from __future__ import annotations

from typing import Any

import torch

from slime.backends.megatron_utils.train.train_metrics import log_memory
from tests.support.ranks import new_trainer, same_tensors
from tests.support.trainer import make_train_data
from tests.support.trainer_ranks import hf_weights, optimizer_tensors, parameters, resume_scenario, train_once

STATELESS = {"use_stateless_adam": True, "no_save_optim": True, "adam_eps": 1e-3, "lr_decay_style": "cosine"}


def memory_scenarios(checkpoint: str, folder: str) -> dict[str, Any]:
    """Return what the test module describes, from every rank."""
    profile = {"use_pytorch_profiler": True, "profile_step_start": 1, "profile_step_end": 2, "profile_ranks": [1]}
    trainer, _ = new_trainer(
        checkpoint,
        use_rollout_entropy=True,
        profile_target=["train_actor", "train_log_probs"],
        tensorboard_dir=f"{folder}/profile",
        **profile,
    )
    for rollout_id in range(3):
        train_once(trainer, rollout_id, make_train_data(seed=0))
    memory = log_memory(trainer.args, 3, trainer._memory, copied=1 + torch.distributed.get_rank())
    return {
        "memory": memory,
        "stateless": _stateless(checkpoint, f"{folder}/stateless"),
        "bf16": bf16_sleep(checkpoint),
    }


def _stateless(checkpoint: str, save: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, flags in {"adam": {"adam_eps": 1e-3}, "stateless": STATELESS}.items():
        trainer, _ = new_trainer(checkpoint, lr_warmup_iters=0, **flags)
        train_once(trainer, 0, make_train_data(seed=0))
        found[f"{name} after a step"] = parameters(trainer)
        found[f"{name} keeps"] = sorted(name for name in optimizer_tensors(trainer) if name.count(".") > 1)
    layouts: list[dict[str, Any]] = [{}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}]
    found["resumed"] = resume_scenario(checkpoint, save, layouts=layouts, first=1, more=1, **STATELESS)
    return found


def bf16_sleep(checkpoint: str) -> dict[str, Any]:
    """Train, offload, give the weights away while offloaded, onload, train: with and without copies of the weights."""
    found: dict[str, Any] = {}
    awake, _ = new_trainer(checkpoint, bf16=True)
    train_once(awake, 0, make_train_data(seed=0))
    train_once(awake, 1, make_train_data(seed=1))
    found["awake"] = parameters(awake)
    for name, rebuilds in {"rebuilt": True, "copied": False}.items():
        trainer, _ = new_trainer(checkpoint, bf16=True, disable_param_buffers_cpu_backup=rebuilds)
        train_once(trainer, 0, make_train_data(seed=0))
        weights = [p for chunk in trainer.model for p in chunk.parameters()]
        before = {
            "parameters": parameters(trainer),
            "optimizer": optimizer_tensors(trainer),
            "export": hf_weights(trainer.model, trainer.args),
        }
        trainer.offload()
        report: dict[str, Any] = {
            "weights": sum(p.numel() * p.element_size() for p in weights),
            "buffers": sum(b.param_data.nbytes for b in trainer.model[0].__dict__["buffers"]),
            "asleep": sum(p.untyped_storage().nbytes() for p in weights),
            "on the host": trainer._offloader.host_bytes,
        }
        with trainer.weights_present():
            report["export"] = same_tensors(hf_weights(trainer.model, trainer.args), before["export"])
        report["asleep again"] = sum(p.untyped_storage().nbytes() for p in weights)
        trainer.onload()
        report["parameters"] = same_tensors(parameters(trainer), before["parameters"])
        report["optimizer"] = same_tensors(optimizer_tensors(trainer), before["optimizer"])
        report["dtype"] = weights[0].dtype
        train_once(trainer, 1, make_train_data(seed=1))
        report["trained"] = parameters(trainer)
        found[name] = report
    # Weights that are not the rounded masters are copied: somebody has put them there.
    with torch.no_grad():
        next(iter(trainer.model[0].parameters())).mul_(2)
    trainer._offloader._copy_rebuildable = False
    before_sleep = parameters(trainer)
    trainer.offload()
    trainer.onload()
    found["others are kept"] = same_tensors(parameters(trainer), before_sleep)
    return found
