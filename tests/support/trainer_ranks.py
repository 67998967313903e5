"""What the ranks of the trainer's integration tests do. One launch runs many scenarios: imports cost seconds.

A scenario is {"args": overrides of ``trainer_args``, "data": arguments of ``make_train_data``, "rollouts": count, ...}.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.trainer import make_shards, make_train_data, trainer_args


def new_trainer(checkpoint: str | Path, *, with_ref: bool = False, **overrides: Any) -> Any:
    """Return (trainer, first rollout id) on this rank, after taking down the layout of an earlier one."""
    from slime.backends.megatron_utils import import_megatron
    from slime.backends.megatron_utils.trainer import MegatronTrainer

    import_megatron()
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    trainer = MegatronTrainer(trainer_args(checkpoint, **overrides), with_ref=with_ref)
    return trainer, trainer.initialize()


def train_once(trainer: Any, rollout_id: int, data: dict[str, Any]) -> dict[str, Any]:
    """Train on ``data`` and return what this rank reports."""
    shards = make_shards(trainer.args, data, dp_size=trainer.parallel_config["dp_size"])
    return trainer.train(rollout_id, shards[trainer.parallel_config["dp_rank"]])


def parameters(trainer: Any) -> dict[str, torch.Tensor]:
    """Return copies of this rank's parameters by name."""
    return {
        f"{i}.{name}": p.detach().clone()
        for i, chunk in enumerate(trainer.model)
        for name, p in chunk.named_parameters()
    }


def run_scenarios(checkpoint: str, scenarios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train every scenario from the checkpoint; return this rank's reports, and the parameters afterwards."""
    results = []
    for scenario in scenarios:
        trainer, _ = new_trainer(checkpoint, with_ref=scenario.get("with_ref", False), **scenario["args"])
        reports = [
            train_once(trainer, i, make_train_data(**{"seed": i, **scenario.get("data", {})}))
            for i in range(scenario.get("rollouts", 1))
        ]
        results.append({"reports": reports, "parameters": parameters(trainer), "parallel": trainer.parallel_config})
    return results


def resume_scenario(
    checkpoint: str, save: str, *, layouts: list[dict[str, Any]], first: int = 2, more: int = 2, **overrides: Any
) -> list[dict[str, Any]]:
    """Train ``first + more`` rollouts under ``layouts[0]``, saving after the first ones; then load and train the rest.

    Loads once for every one of ``layouts``. Returns [uninterrupted, resumed under layouts[0], ...]: reports of the
    later rollouts, final parameters, the first rollout id, whether the loaded parameters are those saved.
    """
    data = [make_train_data(seed=i) for i in range(first + more)]
    trainer, _ = new_trainer(checkpoint, save=save, **layouts[0], **overrides)
    for i in range(first):
        train_once(trainer, i, data[i])
    trainer.save(first - 1, force_sync=True)
    saved = parameters(trainer)
    results = [_finish(trainer, data, first, first)]
    for layout in layouts:
        trainer, start = new_trainer(checkpoint, load=save, save=save, **layout, **overrides)
        same = layout == layouts[0] and all(torch.equal(p, saved[n]) for n, p in parameters(trainer).items())
        results.append({**_finish(trainer, data, start, first), "loaded_equal": same})
    return results


def _finish(trainer: Any, data: list[dict[str, Any]], start: int, first: int) -> dict[str, Any]:
    reports = [train_once(trainer, i, data[i]) for i in range(first, len(data))]
    return {
        "start": start,
        "steps": [report["steps"] for report in reports],
        "parameters": parameters(trainer),
        "scheduler": trainer.scheduler.num_steps,
    }


def hf_weights(model: Any, args: Any) -> dict[str, torch.Tensor]:
    """Return copies of all weights of all pipeline stages by Hugging Face name (collective)."""
    from slime.backends.megatron_utils.weights import iter_hf_weights

    return {name: tensor.detach().clone() for name, tensor in iter_hf_weights(model, args, gather_pp=True)}


def hf_gradients(model: Any, args: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of the last step by Hugging Face name: names and splits are those of the weights."""
    weights = [(p, p.data) for chunk in model for p in chunk.parameters()]
    for p, _ in weights:
        p.data = p.main_grad.to(p.dtype)
    gradients = hf_weights(model, args)
    for p, data in weights:
        p.data = data
    return gradients


def gradients(checkpoint: str, scenarios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train one rollout per scenario with plain SGD; return the metrics and the gradients of its last step."""
    results = []
    for scenario in scenarios:
        overrides = {
            "optimizer": "sgd",
            "sgd_momentum": 0.0,
            "use_distributed_optimizer": False,  # it takes Adam only, and leaves each rank a part of the gradients
            "weight_decay": 0.0,
            "clip_grad": 1e9,
            **scenario["args"],
        }
        trainer, _ = new_trainer(checkpoint, with_ref=scenario.get("with_ref", False), **overrides)
        report = train_once(trainer, 0, make_train_data(**scenario.get("data", {})))
        results.append({**report, "gradients": hf_gradients(trainer.model, trainer.args)})
    return results
