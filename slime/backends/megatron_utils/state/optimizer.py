"""Optimizer and learning-rate schedule from Megatron's flags, and the optimizers of a chain in checkpoints."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slime.arguments.args import Args
from slime.arguments.command_line import flags_where
from slime.arguments.rules.optimizer import train_steps
from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.state.offload import torch_optimizers
from slime.backends.megatron_utils.state.stateless_adam import instead_of_adam
from slime.utils import accelerator

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.transformer_config import TransformerConfig

logger = logging.getLogger(__name__)


# Types that --main-grads-dtype and its kin name; fp8 is kept as bytes with a scale.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}


_MOMENTS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")


def optimizer_config_from_args(args: Args, model_config: TransformerConfig) -> Any:
    """Return the ``OptimizerConfig``: the arguments with the names of its fields, dtypes where they name some.

    The parameters' dtype is that of ``model_config``.
    """
    import_megatron()
    from megatron.core.optimizer import OptimizerConfig

    names = {field.name for field in dataclasses.fields(OptimizerConfig) if field.init}
    values = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    for name in (flag.dest for flag in flags_where(lambda traits: traits.dtype)):
        if isinstance(values.get(name), str):
            values[name] = DTYPES[values[name]]
    values.update(params_dtype=model_config.params_dtype, bf16=model_config.bf16, fp16=model_config.fp16, timers=None)
    return OptimizerConfig(**values)


def build_optimizer(args: Args, model: Sequence[torch.nn.Module]) -> Any:
    """Return Megatron's optimizer (a ``ChainedOptimizer``) for ``model``, with Adam's state allocated.

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
    choose_adam_kernel(optimizer)
    return optimizer


def allocate_adam_state(optimizer: ChainedOptimizer) -> None:
    """Create the state that ``torch.optim.Adam(W)`` otherwise creates in its first ``step()``.

    Megatron's sharded state dict asserts that it is there, both for a save before the first step and as the target
    of a load. TransformerEngine's and apex's optimizers look after themselves.
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


def choose_adam_kernel(optimizer: ChainedOptimizer) -> None:
    """Let ``torch.optim.Adam(W)`` step in one kernel on CUDA; call after every load of its state, too.

    Its usual path there copies a moment of all parameters at once: 4 bytes per parameter on top of a full GPU. The
    fused kernel copies nothing, and reads the number of steps from the device. A loaded state has the choice of the
    run that saved it, which may have been on another device.
    """
    fused = True if accelerator.device_type() == "cuda" else None
    for inner in torch_optimizers(optimizer):
        if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            continue
        for group in inner.param_groups:
            group["fused"], group["foreach"] = fused, None
            for parameter in group["params"]:
                state = inner.state.get(parameter, {})
                if "step" in state:
                    state["step"] = state["step"].to(parameter.device if fused else "cpu")


def reset_optimizer_states(optimizer: ChainedOptimizer) -> None:
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


def build_scheduler(args: Args, optimizer: ChainedOptimizer) -> Any:
    """Return Megatron's ``OptimizerParamScheduler``. Its unit is samples: it advances by the global batch size a step.

    ``--lr-decay-iters`` and ``--lr-wsd-decay-iters`` count optimizer steps; ``--lr-decay-iters`` defaults to the
    length of the run. Warm-up is ``--lr-warmup-fraction`` of the decay, or ``--lr-warmup-iters`` steps.
    """
    import_megatron()
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    batch = args.global_batch_size
    steps = max(1, train_steps(args) or 0)
    decay_iters = args.lr_decay_iters or steps
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
        wd_incr_steps=steps * batch,
        wd_incr_style=args.weight_decay_incr_style or "constant",
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=wsd_iters * batch if wsd_iters is not None else None,
        lr_wsd_decay_style=args.lr_wsd_decay_style or "exponential",
    )


def with_length_of_run(args: Args, scheduler: OptimizerParamScheduler, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the ``saved`` state of a schedule, whose lengths are those of ``scheduler`` where no flag gives them.

    They follow from ``--num-rollout`` then, and a run that is to be longer than the saved one continues.
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
    before = saved.get("lr_decay_steps", 0)
    if own.get("lr_decay_steps", before) != before and scheduler.lr_decay_style != "constant":
        batch = args.global_batch_size
        logger.warning(
            "the learning rate (--lr-decay-style %s) now decays over the %g optimizer steps of --num-rollout %d, over "
            "%g until now; --lr-decay-iters %g keeps the end of its decay where it was",
            scheduler.lr_decay_style, own["lr_decay_steps"] / batch, args.num_rollout, before / batch, before / batch,
        )  # fmt: skip
    return {**saved, **own}


def _first(value: float | None, default: float) -> float:
    return default if value is None else value


EXPERTS = 1


"""The place of the experts' optimizer in the chain."""


def check_optimizers(saved: dict[Any, Any], optimizer: ChainedOptimizer, directory: Path) -> None:
    """Raise ValueError for the state of another number of optimizers than ``optimizer`` chains.

    That of one for experts and the rest (as Megatron saves where it does not divide experts) will do for two.
    """
    held, own = len(_parts(saved)), len(optimizer.chained_optimizers)
    if held == own or (held == 1 and own == EXPERTS + 1 and "param_state_sharding_type" in saved):
        return
    raise ValueError(
        f"checkpoint {directory} has the state of {held} optimizers, this run has {own}: routed experts have one of "
        "their own. Resume the model that was saved, with the same parameters frozen, or continue without that state: "
        "--no-load-optim"
    )


def for_chain(loaded: dict[Any, Any], optimizer: ChainedOptimizer) -> dict[Any, Any]:
    """Return the loaded state for ``optimizer``: what one optimizer shared is said of each of the chain.

    The groups of the two differ in their names alone: ``is_expert_parallel`` is a part of it.
    """
    shared = {key: value for key, value in loaded.items() if not isinstance(key, int)}
    if len(optimizer.chained_optimizers) == 1 or not shared:
        return loaded
    chain = {}
    for place in range(len(optimizer.chained_optimizers)):
        groups = [{**group, "is_expert_parallel": place == EXPERTS} for group in shared["optimizer"]["param_groups"]]
        inner = {**shared["optimizer"], "param_groups": groups}
        chain[place] = {**shared, "optimizer": inner, **loaded.get(place, {})}
    return chain


def complete_steps(state: dict[Any, Any], device: torch.device) -> None:
    """Fill in the number of steps where an optimizer holds no parameter on this rank, in place. Collective.

    All optimizers step together. A rank without experts, or without a share of some parameters, knows from the others
    how often; it may be rank 0, which speaks for all.
    """
    parts = _parts(state)
    own = max((_steps(part) for part in parts), default=0)
    steps = torch.tensor(own, device=device)
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    count = int(steps.item())
    for part in parts:
        if not part.get("param_state", True):
            del part["param_state"]  # nothing of this rank's is what all ranks save alike, and would differ
        inner = part.get("optimizer", part)
        if "state" in inner:
            if any("betas" in group for group in inner["param_groups"]):
                inner["state"].setdefault("common_step", torch.tensor(float(count)))
        elif any("step" in group for group in inner["param_groups"]):
            for group in inner["param_groups"]:
                group["step"] = count


def _parts(state: dict[Any, Any]) -> list[dict[Any, Any]]:
    """The states of the optimizers: those of a chain have numbers as keys."""
    return [value for key, value in sorted(state.items(), key=str) if isinstance(key, int)] or [state]


def _steps(part: dict[Any, Any]) -> int:
    inner = part.get("optimizer", part)
    found = [group.get("step") or 0 for group in inner["param_groups"]]
    found.append(inner.get("state", {}).get("common_step", 0))
    return int(max(found))
