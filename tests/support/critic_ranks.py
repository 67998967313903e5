"""Ranks of the critic's integration tests: critics train, save, load; actors train with their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.ranks import error_of, new_trainer
from tests.support.trainer import PLAIN_SGD, make_shards, make_train_data
from tests.support.trainer_ranks import hf_gradients, parameters

PPO = {
    "advantage_estimator": "ppo",
    "use_critic": True,
    "gamma": 0.9,
    "lambd": 0.8,
    "global_batch_size": 4,
}
CRITIC = {
    "loss_type": "value_loss",
    "untie_embeddings_and_output_weights": True,
    "value_clip": 0.02,
    "num_critic_only_steps": 10**6,  # so that it reports the rollouts
    "init_method_std": 0.05,
}
SGD = {**PLAIN_SGD, "start_weight_decay": 0.0, "end_weight_decay": 0.0}
CAPTURED: dict[str, Any] = {}


def start(role: str, checkpoint: str, *, with_ref: bool = False, **settings: Any) -> tuple[Any, int]:
    """Return (trainer, first rollout id) of a PPO run."""
    flags = {**PPO, **(CRITIC if role == "critic" else {}), **settings}
    return new_trainer(checkpoint, role=role, with_ref=with_ref, **flags)


def train(trainer: Any, rollout_id: int, values: dict[str, Any] | None = None, **data: Any) -> dict[str, Any]:
    """Train on made-up samples; return what the trainer returns, and what it logged: metric -> values."""
    from slime.observability import tracking

    tracking.drain()
    shards = make_shards(trainer.args, make_train_data(seed=rollout_id, **data), trainer.parallel_config)
    result = trainer.train(rollout_id, shards[trainer.parallel_config["dp_rank"]], external_data=values)
    logged: dict[str, list[float]] = {}
    for record in tracking.drain():
        logged.setdefault(record["name"], []).append(record["value"])
    return {"result": result, "logged": logged}


def capture(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Hook: keep what the loss of the actor will see."""
    from slime.backends.megatron_utils.train.cp_utils import all_gather_with_cp

    for name in ("advantages", "returns", "values", "kl"):
        if name in rollout_data:
            lengths = zip(
                rollout_data[name], rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True
            )
            whole = [all_gather_with_cp(*entry).cpu() for entry in lengths]
            CAPTURED[name] = dict(zip(rollout_data["sample_indices"], whole, strict=True))


def layouts(checkpoint: str, scenarios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per scenario: two rollouts of a critic, then of an actor with its values, under one parallel layout."""
    results = []
    for scenario in scenarios:
        critic, _ = start("critic", checkpoint, adam_eps=1e-3, lr=1e-2, **scenario)
        head = head_of(critic)
        trained = [train(critic, i) for i in range(2)]
        actor, _ = start(
            "actor",
            checkpoint,
            adam_eps=1e-3,
            lr=1e-2,
            kl_coef=0.1,
            ref_load=checkpoint,
            with_ref=True,
            normalize_advantages=True,
            rollout_data_postprocess_path="tests.support.critic_ranks.capture",
            **scenario,
        )
        acted = []
        for i in range(2):
            CAPTURED.clear()
            acted.append({**train(actor, i, trained[i]["result"]), "captured": dict(CAPTURED)})
        results.append({"first head": head, "head": head_of(critic), "critic": trained, "actor": acted})
    return results


def alone(checkpoint: str, folder: str, scenarios: list[dict[str, Any]]) -> dict[str, Any]:
    """On one process: gradients of plain SGD, checkpoints, refusals, and the layouts."""
    found: dict[str, Any] = {"gradients": _gradients(checkpoint), **_checkpoints(checkpoint, folder)}
    found["refusals"] = _refusals(checkpoint)
    found["layouts"] = layouts(checkpoint, scenarios)
    return found


def _gradients(checkpoint: str) -> dict[str, Any]:
    critic, _ = start("critic", checkpoint, **SGD, lr=0.02)
    head = head_of(critic)
    trained = train(critic, 0)
    [chunk] = critic.model
    head_gradients = [p.main_grad.clone() for name, p in chunk.named_parameters() if "output_layer" in name]
    return {**trained, "head": head, "head_grads": head_gradients, "grads": hf_gradients(critic.model, critic.args)}


def _checkpoints(checkpoint: str, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    save = f"{folder}/critic"
    critic, found["first start"] = start("critic", checkpoint, save=save)
    found["fresh head"] = head_of(critic)
    train(critic, 0)
    critic.save(0)
    found["saved"] = parameters(critic)
    found["uninterrupted"] = {**train(critic, 1), "parameters": parameters(critic)}
    critic, found["start"] = start("critic", checkpoint, load=save)
    found["loaded"] = parameters(critic)
    found["resumed"] = {**train(critic, 1), "parameters": parameters(critic)}

    actor, _ = start("actor", checkpoint, save=f"{folder}/actor", advantage_estimator="grpo", use_critic=False)
    train(actor, 0)
    actor.save(0)
    body = parameters(actor)
    critic, found["start from the actor"] = start("critic", checkpoint, load=f"{folder}/actor")
    found["from the actor"], found["actor"] = parameters(critic), body
    critic.offload()
    found["asleep"] = sum(p.untyped_storage().nbytes() for chunk in critic.model for p in chunk.parameters())
    critic.onload()
    found["awake"] = parameters(critic)
    return found


def _refusals(checkpoint: str) -> dict[str, str]:
    actor, _ = start("actor", checkpoint)
    shards = make_shards(actor.args, make_train_data(seed=0), actor.parallel_config)
    good = [torch.zeros(n) for n in shards[0].to_rollout_data()["response_lengths"]]
    spoilt = {
        "missing": {},
        "too few samples": {"values": good[1:]},
        "too short": {"values": [good[0][1:], *good[1:]]},
        "infinite": {"values": [*good[:-1], good[-1] / 0]},
    }
    return {
        name: error_of(lambda columns=columns: actor.train(0, shards[0], external_data=columns))
        for name, columns in spoilt.items()
    }


def resume_elsewhere(checkpoint: str, save: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Continue, under another layout, the critic that ``alone`` saved, for a rollout."""
    critic, begin = start("critic", checkpoint, load=save, **layout)
    return {"start": begin, **train(critic, 1)}


def pairs(checkpoint: str, save: str, scenarios: list[dict[str, Any]], resumed: dict[str, Any]) -> dict[str, Any]:
    """On two processes: the layouts, and a critic that was saved on one."""
    return {"layouts": layouts(checkpoint, scenarios), "resumed": resume_elsewhere(checkpoint, save, resumed)}


def head_of(critic: Any) -> dict[str, torch.Tensor]:
    """Return copies of the value head's parameters, {} where another stage has it."""
    return {
        Path(name.replace(".", "/")).name: value
        for name, value in parameters(critic).items()
        if ".output_layer." in name
    }
