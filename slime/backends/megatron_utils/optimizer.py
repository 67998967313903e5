"""Optimiser and learning-rate schedule from Megatron's flags."""

from __future__ import annotations

import dataclasses
import logging
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.offload import torch_optimizers
from slime.backends.megatron_utils.stateless_adam import instead_of_adam

logger = logging.getLogger(__name__)

# Types that --main-grads-dtype and its kin name; fp8 is kept as bytes with a scale.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}

_MOMENTS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")


def train_iterations(args: Namespace) -> int:
    """Return the number of optimiser steps of the whole run.

    ``num_rollout * rollout_batch_size * n_samples_per_prompt // global_batch_size``, the horizon of the schedule.
    """
    return args.num_rollout * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size


def optimizer_config_from_args(args: Namespace, model_config: Any) -> Any:
    """Return the ``OptimizerConfig``: the arguments with the names of its fields, dtypes where they name some.

    The parameters' dtype is that of ``model_config``.
    """
    import_megatron()
    from megatron.core.optimizer import OptimizerConfig

    names = {field.name for field in dataclasses.fields(OptimizerConfig) if field.init}
    values = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if isinstance(values.get(name), str):
            values[name] = DTYPES[values[name]]
    values.update(params_dtype=model_config.params_dtype, bf16=model_config.bf16, fp16=model_config.fp16, timers=None)
    return OptimizerConfig(**values)


def build_optimizer(args: Namespace, model: Sequence[torch.nn.Module]) -> Any:
    """Return Megatron's optimiser (a ``ChainedOptimizer``) for ``model``, with Adam's state allocated.

    With ``--use-stateless-adam`` there is none.
    """
    import_megatron()
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.utils import get_model_config

    with instead_of_adam() if args.use_stateless_adam else nullcontext():
        optimizer = get_megatron_optimizer(
            optimizer_config_from_args(args, get_model_config(model[0])),
            list(model),
            use_gloo_process_groups=args.enable_gloo_process_groups,
        )
    allocate_adam_state(optimizer)
    return optimizer


def allocate_adam_state(optimizer: Any) -> None:
    """Create the state that ``torch.optim.Adam(W)`` otherwise creates in its first ``step()``.

    Megatron's sharded state dict asserts that it is there, both for a save before the first step and as the target
    of a load. TransformerEngine's and apex's optimisers look after themselves.
    """
    for inner in torch_optimizers(optimizer):
        if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter].update(
                        step=torch.zeros((), dtype=torch.float32),
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )


def reset_optimizer_states(optimizer: Any) -> None:
    """Zero moments and step counts in place (``--reset-optimizer-states``), not the weights that some keep there."""
    for inner in torch_optimizers(optimizer):
        for group in inner.param_groups:
            if "step" in group:
                group["step"] = 0
        for state in inner.state.values():
            for name in _MOMENTS:
                if torch.is_tensor(state.get(name)):
                    state[name].zero_()
                elif name in state:
                    state[name] = 0


def build_scheduler(args: Namespace, optimizer: Any) -> Any:
    """Return Megatron's ``OptimizerParamScheduler``. Its unit is samples: it advances by the global batch size a step.

    ``--lr-decay-iters`` and ``--lr-wsd-decay-iters`` count optimiser steps; ``--lr-decay-iters`` defaults to the
    length of the run. Warm-up is ``--lr-warmup-fraction`` of the decay, or ``--lr-warmup-iters`` steps.
    """
    import_megatron()
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    batch = args.global_batch_size
    decay_iters = args.lr_decay_iters or max(1, train_iterations(args))
    decay_steps = decay_iters * batch
    fraction = args.lr_warmup_fraction
    warmup_steps = fraction * decay_steps if fraction is not None else (args.lr_warmup_iters or 0) * batch
    wsd_iters = args.lr_wsd_decay_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init or 0.0,
        max_lr=args.lr,
        min_lr=args.min_lr or 0.0,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=args.lr_decay_style or "linear",
        start_wd=_first(args.start_weight_decay, args.weight_decay),
        end_wd=_first(args.end_weight_decay, args.weight_decay),
        wd_incr_steps=max(1, train_iterations(args)) * batch,
        wd_incr_style=args.weight_decay_incr_style or "constant",
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=wsd_iters * batch if wsd_iters is not None else None,
        lr_wsd_decay_style=args.lr_wsd_decay_style or "exponential",
    )


def with_length_of_run(args: Namespace, scheduler: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the ``saved`` state of a schedule, whose lengths are those of ``scheduler`` where no flag gives them.

    They follow from ``--num-rollout`` then, and a run that is to be longer than the one that was saved goes on.
    ``--use-checkpoint-opt_param-scheduler`` keeps those that were saved.
    """
    if scheduler.use_checkpoint_opt_param_scheduler:
        return saved
    derived = ["wd_incr_steps"]
    if args.lr_decay_iters is None:
        derived.append("lr_decay_steps")
        if args.lr_warmup_fraction is not None:
            derived.append("lr_warmup_steps")
    own = {name: getattr(scheduler, name) for name in derived if name in saved}
    before = saved.get("lr_decay_steps")
    if own.get("lr_decay_steps", before) != before and scheduler.lr_decay_style != "constant":
        batch = args.global_batch_size
        logger.warning(
            "the learning rate (--lr-decay-style %s) now decays over the %g optimiser steps of --num-rollout %d, over "
            "%g until now; --lr-decay-iters %g keeps the end of its decay where it was",
            scheduler.lr_decay_style, own["lr_decay_steps"] / batch, args.num_rollout, before / batch, before / batch,
        )  # fmt: skip
    return {**saved, **own}


def _first(value: float | None, default: float) -> float:
    return default if value is None else value
