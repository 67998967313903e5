"""Ranks of the trainer's integration tests. One launch runs many scenarios: imports cost seconds.

A scenario is {"args": overrides of ``trainer_args``, "data": arguments of ``make_train_data``, "rollouts": count, ...}.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.support.ranks import error_of, new_trainer, same_tensors
from tests.support.trainer import PLAIN_SGD, make_shards, make_train_data


def train_once(trainer: Any, rollout_id: int, data: dict[str, Any]) -> dict[str, Any]:
    """Train on ``data`` and return what this rank reports."""
    shards = make_shards(trainer.args, data, trainer.parallel_config)
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
    """Train one rollout per scenario with plain SGD; return the metrics and the gradients of its last step.

    A scenario may have a "checkpoint" of its own.
    """
    results = []
    for scenario in scenarios:
        model, flags = scenario.get("checkpoint", checkpoint), {**PLAIN_SGD, **scenario["args"]}
        trainer, _ = new_trainer(model, with_ref=scenario.get("with_ref", False), **flags)
        report = train_once(trainer, 0, make_train_data(**scenario.get("data", {})))
        assert not graphs_kept(trainer.model)
        results.append({**report, "gradients": hf_gradients(trainer.model, trainer.args)})
    return results


def graphs_kept(model: Any) -> list[str]:
    """Return the tensors that dispatchers of experts keep with their autograd graph."""
    return [
        name
        for chunk in model
        for module in chunk.modules()
        for name, value in vars(getattr(module, "token_dispatcher", object)).items()
        if torch.is_tensor(value) and value.requires_grad
    ]


def killed_while_saving(checkpoint: str, save: str) -> None:
    """Save iteration 0, then die by SIGKILL in the middle of writing iteration 1."""
    import os
    import signal

    trainer, _ = new_trainer(checkpoint, save=save)
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    train_once(trainer, 0, make_train_data(seed=0))
    trainer.save(0)
    torch.save(parameters(trainer), os.path.join(save, "parameters.pt"))
    train_once(trainer, 1, make_train_data(seed=1))

    def write_half(transforms: Any, number: int, bucket: Any, *args: Any, **kwargs: Any) -> None:
        with open(bucket[0], "wb") as file:
            file.write(b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)

    filesystem_async.FileSystemWriterAsync.write_preloaded_data = staticmethod(write_half)
    trainer.save(1)


def state_scenarios(checkpoint: str, folder: str, killed: str) -> dict[str, Any]:
    """Save, load and offload on one process; the test module has the expected value of each entry."""
    found: dict[str, Any] = {}

    trainer, found["start after the kill"] = new_trainer(checkpoint, load=killed, save=killed)
    found["parameters after the kill"] = parameters(trainer)
    train_once(trainer, 1, make_train_data(seed=1))
    trainer.save(1)
    found["tracker after the next save"] = Path(killed, "latest_checkpointed_iteration.txt").read_text().strip()

    save = f"{folder}/background"
    trainer, _ = new_trainer(checkpoint, save=save, async_save=True, save_hf=f"{folder}/hf_{{rollout_id}}")
    train_once(trainer, 0, make_train_data(seed=0))
    at_save = parameters(trainer)
    trainer.save(0)
    train_once(trainer, 1, make_train_data(seed=1))
    trainer.finish_saving()
    found["uninterrupted"] = parameters(trainer)
    trainer, found["start after a background save"] = new_trainer(checkpoint, load=save)
    found["background save is of its moment"] = same_tensors(parameters(trainer), at_save)
    train_once(trainer, 1, make_train_data(seed=1))
    found["resumed"] = parameters(trainer)

    trainer, found["start with finetune"] = new_trainer(checkpoint, load=save, finetune=True)
    found["finetune takes the weights"] = same_tensors(parameters(trainer), at_save)
    trainer, found["start from the export"] = new_trainer(checkpoint, load=f"{folder}/hf_0")
    found["export has the weights"] = same_tensors(parameters(trainer), at_save)

    weights_only = f"{folder}/weights"
    trainer, _ = new_trainer(checkpoint, save=weights_only, no_save_optim=True)
    train_once(trainer, 0, make_train_data(seed=0))
    trainer.save(0)
    trainer, found["start without optimizer"] = new_trainer(checkpoint, load=weights_only, no_load_optim=True)
    found["weights without optimizer"] = same_tensors(parameters(trainer), at_save)
    found["refusal without optimizer"] = error_of(lambda: new_trainer(checkpoint, load=weights_only))
    found.update(_sleeping(checkpoint))
    return found


def optimizer_tensors(trainer: Any) -> dict[str, torch.Tensor]:
    """Return copies of the moments, and the fp32 parameters the optimizer steps."""
    from slime.backends.megatron_utils.state.offload import torch_optimizers

    found = {}
    for i, inner in enumerate(torch_optimizers(trainer.optimizer)):
        parameters = [p for group in inner.param_groups for p in group["params"]]
        for j, p in enumerate(parameters):
            found[f"{i}.{j}"] = p.detach().clone()
            found.update({f"{i}.{j}.{k}": v.clone() for k, v in inner.state[p].items() if torch.is_tensor(v)})
    return found


def _sleeping(checkpoint: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    final = []
    for sleeps in (False, True):
        trainer, _ = new_trainer(checkpoint, ref_load=checkpoint, use_kl_loss=True, kl_loss_coef=0.1, with_ref=True)
        train_once(trainer, 0, make_train_data(seed=0))
        if sleeps:
            before, moments, exported = (
                parameters(trainer),
                optimizer_tensors(trainer),
                hf_weights(trainer.model, trainer.args),
            )
            trainer.offload()
            tensors = [p for chunk in trainer.model for p in chunk.parameters()]
            found["bytes of parameters asleep"] = sum(p.untyped_storage().nbytes() for p in tensors)
            found["bytes of gradients asleep"] = sum(p.main_grad.untyped_storage().nbytes() for p in tensors)
            with trainer.weights_present():
                found["weights can be exported asleep"] = same_tensors(
                    hf_weights(trainer.model, trainer.args), exported
                )
            found["bytes of parameters after the export"] = sum(p.untyped_storage().nbytes() for p in tensors)
            train = partial(train_once, trainer, 1, make_train_data(seed=1))
            found["refusal to train asleep"] = error_of(train, RuntimeError)
            trainer.onload()
            found["parameters are back"] = same_tensors(parameters(trainer), before)
            found["optimizer state is back"] = same_tensors(optimizer_tensors(trainer), moments)
        train_once(trainer, 1, make_train_data(seed=1))
        final.append(parameters(trainer))
    found["sleep changes nothing"] = same_tensors(*final)
    return found


CALLS: list[tuple[Any, ...]] = []


def note_init(args: Any) -> None:
    """Hook: after Megatron is initialized."""
    assert (args.rank, args.world_size) == (torch.distributed.get_rank(), torch.distributed.get_world_size())
    CALLS.append(("init",))


def note_log_prob(args: Any, model: Any, store_prefix: str) -> None:
    """Hook: before a forward-only pass."""
    CALLS.append(("log_prob", store_prefix, model[0].training))


def note_step(args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Hook: before a train step; gradients are zero then."""
    zero = all(bool((p.main_grad == 0).all()) for p in model[0].parameters())
    CALLS.append(("step", rollout_id, step_id, zero, scheduler.num_steps))


def zero_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Hook: an advantage function."""
    CALLS.append(("advantages", sorted(k for k in ("kl", "log_probs") if k in rollout_data)))
    rollout_data["advantages"] = rollout_data["returns"] = [torch.zeros_like(kl) for kl in rollout_data["kl"]]


def spoil_one_advantage(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Hook after the advantages: make one of the sample with index 103 infinite, on the rank that has it."""
    indices = rollout_data["sample_indices"]
    if 103 in indices:
        rollout_data["advantages"][indices.index(103)][0] = float("inf")


def twice_the_likelihood(args: Any, batch: Any, logits: Any, sum_of_sample_mean: Any) -> Any:
    """Hook: a custom loss."""
    from slime.backends.megatron_utils.train.loss import sft_loss_function

    loss, _ = sft_loss_function(args, batch, logits, sum_of_sample_mean)
    return 2 * loss, {"loss": 2 * loss.detach(), "twice": loss.detach()}


def likelihood_and_samples_by_length(args: Any, batch: Any, logits: Any, sum_of_sample_mean: Any) -> Any:
    """Hook: a custom loss whose micro-batches of one sample each have metrics of different names, order and number."""
    from slime.backends.megatron_utils.train.loss import sft_loss_function

    loss, metrics = sft_loss_function(args, batch, logits, sum_of_sample_mean)
    (response,) = batch["response_lengths"]
    one = sum_of_sample_mean(torch.ones(response))
    if batch["sample_indices"] == [100]:
        return loss, {"first": 3 * one, **metrics}
    return loss, {**metrics, **({"long": one} if response > 12 else {"short": one, "short_tokens": response * one})}


def mask_everything(args: Any, *, pg_loss: Any, loss_masks: Any, **kwargs: Any) -> Any:
    """Hook: an importance correction that masks all tokens."""
    return pg_loss, [torch.zeros_like(mask) for mask in loss_masks], {"mine": torch.ones_like(pg_loss)}


def plain_sum_reducer(
    total_lengths: Any, response_lengths: Any, loss_masks: Any, calculate_per_token_loss: bool
) -> Any:
    """Hook: a reducer that ignores masks."""
    return lambda values: values.sum()


def _non_finite(checkpoint: str, **overrides: Any) -> dict[str, Any]:
    hook = "tests.support.trainer_ranks.spoil_one_advantage"
    trainer, _ = new_trainer(checkpoint, rollout_data_postprocess_path=hook, **overrides)
    before = parameters(trainer)
    try:
        result: Any = train_once(trainer, 4, make_train_data(seed=0))["steps"]
    except RuntimeError as error:
        result = f"{type(error).__name__}: {error}"
    return {
        "result": result,
        "unchanged": same_tensors(parameters(trainer), before),
        "scheduler": trainer.scheduler.num_steps,
    }


def behaviour_scenarios(checkpoint: str, folder: str) -> dict[str, Any]:
    """Hooks, dumps, the reference's refresh, the skipped pass, NaN; on one or two processes (then data parallel)."""
    found: dict[str, Any] = {}
    here = "tests.support.trainer_ranks."
    data = make_train_data(seed=0)

    for name, extra in {"skipped": {}, "computed": {"use_rollout_entropy": True}}.items():
        trainer, _ = new_trainer(checkpoint, **extra)
        found[name] = {**train_once(trainer, 0, data), "parameters": parameters(trainer)}

    trainer, _ = new_trainer(
        checkpoint,
        with_ref=True,
        ref_load=checkpoint,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="k1",
        ref_update_interval=2,
        global_batch_size=4,
        custom_megatron_init_path=here + "note_init",
        custom_megatron_before_log_prob_hook_path=here + "note_log_prob",
        custom_megatron_before_train_step_hook_path=here + "note_step",
        save_debug_train_data=folder + "/dump_{rollout_id}.pt",
    )
    CALLS.clear()
    found["refreshed"] = [train_once(trainer, i, data) for i in range(3)]
    found["calls"] = list(CALLS)

    CALLS.clear()
    trainer, _ = new_trainer(checkpoint, custom_advantage_function_path=here + "zero_advantages", entropy_coef=0.0)
    found["zero advantages"] = {**train_once(trainer, 0, data), "calls": list(CALLS)}

    sft = {"compute_advantages_and_returns": False}
    trainer, _ = new_trainer(checkpoint, loss_type="sft_loss", **sft)
    found["sft"] = train_once(trainer, 0, data)["steps"][0]
    custom = {"custom_loss_function_path": here + "twice_the_likelihood", "recompute_loss_function": True}
    trainer, _ = new_trainer(checkpoint, loss_type="custom_loss", **sft, **custom)
    found["custom loss"] = train_once(trainer, 0, data)["steps"][0]

    custom = {"custom_loss_function_path": here + "likelihood_and_samples_by_length", "micro_batch_size": 1}
    trainer, _ = new_trainer(checkpoint, loss_type="custom_loss", **sft, **custom)
    found["names that differ"] = train_once(trainer, 0, data)["steps"][0]

    tis = {"use_tis": True, "custom_tis_function_path": here + "mask_everything", "entropy_coef": 0.1}
    trainer, _ = new_trainer(checkpoint, **tis)
    found["masked by the correction"] = train_once(trainer, 0, data)["steps"][0]
    trainer, _ = new_trainer(checkpoint, custom_pg_loss_reducer_function_path=here + "plain_sum_reducer")
    found["own reducer"] = train_once(trainer, 0, data)["steps"][0]

    trainer, _ = new_trainer(
        checkpoint,
        with_ref=True,
        ref_load=checkpoint,
        advantage_estimator="rloo",
        kl_coef=0.1,
        save_debug_train_data=folder + "/rloo_{rollout_id}.pt",
    )
    for rollout_id in range(2):
        train_once(trainer, rollout_id, {**data, "group_indices": [i // 2 for i in range(8)]})

    limits = {"mismatch_alarm_threshold": 0.0, "mismatch_stop_threshold": 1e-3}
    trainer, _ = new_trainer(checkpoint, **limits)
    before = parameters(trainer)
    message = error_of(lambda: train_once(trainer, 0, data), RuntimeError)
    found["mismatch"] = message, same_tensors(parameters(trainer), before)

    found["not finite"] = _non_finite(checkpoint)
    found["not finite, skipped"] = _non_finite(checkpoint, check_for_nan_in_loss_and_grad=False)

    trainer, _ = new_trainer(checkpoint)
    shard = make_shards(trainer.args, data, trainer.parallel_config)[trainer.parallel_config["dp_rank"]]
    tokens = shard.batch.ragged["tokens"]
    tokens.values[tokens.offsets[1] + 1] = 10**6
    found["vocabulary"] = (
        int(shard.batch.numbers["sample_indices"][1]), error_of(lambda: trainer.train(0, shard)),
    )  # fmt: skip
    return found
