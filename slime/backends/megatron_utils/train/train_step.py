"""The optimizer steps of one rollout: forward, backward, clip, update, schedule, metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slime.arguments.args import Args
from slime.backends.megatron_utils.model.mtp_loss import needs_shared_embedding
from slime.backends.megatron_utils.state.parallel import (
    all_gather_objects,
    gather_from_world,
    is_last_stage,
    pipeline_parallel,
)
from slime.backends.megatron_utils.train.balancing import Balancing
from slime.backends.megatron_utils.train.data import RolloutData, sample_name, steps_of
from slime.backends.megatron_utils.train.hooks import TrainerHooks
from slime.backends.megatron_utils.train.logprob_passes import run_schedule
from slime.backends.megatron_utils.train.loss import loss_function
from slime.backends.megatron_utils.train.mismatch import MismatchMeter
from slime.backends.megatron_utils.train.routing_replay import RoutingReplay

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import ChainedOptimizer


class NonFiniteError(RuntimeError):
    """A loss or a gradient is NaN or infinite; the parameters were not updated."""


@dataclass(frozen=True)
class StepContext:
    """Context that every step needs. ``optimizer`` is Megatron's ``ChainedOptimizer``; None in a run without steps."""

    args: Args
    model: Sequence[Any]
    optimizer: Any
    scheduler: Any
    hooks: TrainerHooks
    device: torch.device
    routing: RoutingReplay = field(default_factory=lambda: RoutingReplay(Args()))
    balancing: Balancing = field(default_factory=Balancing)


def train_rollout(context: StepContext, rollout_id: int, data: RolloutData) -> list[dict[str, float]]:
    """Train on ``data``; return per optimizer step the metrics of spec names without prefix (``loss``, ``grad_norm``).

    Loss metrics are present on the last pipeline stage only. Raises ``NonFiniteError`` and ``MismatchError`` on all
    ranks alike.
    """
    steps = steps_of(data)
    metrics = []
    meter = MismatchMeter(context.args, rollout_id, data, context.device)
    lends = needs_shared_embedding(context.args)
    for step_id, micro_batches in enumerate(steps):
        batch_size = int(data["global_batch_sizes"][step_id])
        with _borrow_embedding(context) if lends else nullcontext():
            metrics.append(_train_step(context, rollout_id, step_id, data, micro_batches, batch_size, meter))
        # An embedding that is lent has to be whole when the step begins.
        _complete_parameters(context.model, last=lends or step_id == len(steps) - 1)
    return metrics


def _borrow_embedding(context: StepContext) -> AbstractContextManager[None]:
    from slime.backends.megatron_utils.model.mtp_model import borrow_embedding

    return borrow_embedding(context.args, context.model)


def _complete_parameters(model: Sequence[Any], *, last: bool) -> None:
    """With ``--overlap-param-gather``: let the next step's forward gather updated parameters, the last step do it now.

    Outside of the steps the weights are read by others (log-prob passes with swapped weights, weight sync, saves), so
    they are whole there and Megatron's forward hooks are off.
    """
    for chunk in model:
        ddp = getattr(chunk, "ddp_config", None)
        if ddp is None or not ddp.overlap_param_gather:
            continue
        hooked = bool(chunk.remove_forward_pre_hook_handles)
        if not last and not hooked:
            chunk.enable_forward_pre_hook()
        elif last and hooked:
            chunk.disable_forward_pre_hook(param_sync=True)
        elif last:
            chunk.start_param_sync(force_sync=True)


def configure_schedules(context: StepContext) -> None:
    """Tell Megatron's schedules how to scale the loss, defer gradient reduction and finish gradients."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config

    config = get_model_config(context.model[0])
    if len(context.model) > 1 and pipeline_parallel().size == 2 and not config.overlap_p2p_comm:
        # Each stage is then both the next and the previous one of the other, and a batch of sends and receives between
        # the same two ranks is matched in order: activations and gradients would change places without an error.
        raise ValueError(
            "virtual pipeline stages on --pipeline-model-parallel-size 2 need overlapped pipeline communication: "
            "leave out --no-overlap-p2p-communication"
        )
    if config.overlap_p2p_comm and context.device.type == "cpu":
        # The schedule frees an output right after it began to send it. CUDA's streams keep the memory until it is sent;
        # gloo sends from another thread, at times what the next user of the memory wrote there.
        config.deallocate_pipeline_outputs = False
    config.grad_scale_func = context.optimizer.scale_loss if context.optimizer is not None else None
    config.timers = None
    config.finalize_model_grads_func = finalize_model_grads
    config.calculate_per_token_loss = context.args.calculate_per_token_loss
    ddp = getattr(context.model[0], "ddp_config", None)
    if ddp is None:
        return
    ddp.check_for_nan_in_grad = False  # _update looks itself, and can name the samples
    if ddp.overlap_param_gather:
        for chunk in context.model:
            chunk.disable_forward_pre_hook(param_sync=False)  # see _complete_parameters
    # The bf16/fp32 reduction is started per micro-batch only when it overlaps; otherwise once, at the end.
    if ddp.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in context.model])
        config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in context.model])


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def _train_step(
    context: StepContext,
    rollout_id: int,
    step_id: int,
    data: RolloutData,
    micro_batches: list[list[int]],
    global_batch_size: int,
    meter: MismatchMeter,
) -> dict[str, float]:
    args, model, optimizer = context.args, context.model, context.optimizer
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    if context.hooks.before_train_step is not None:
        context.hooks.before_train_step(args, rollout_id, step_id, model, optimizer, context.scheduler)

    def loss_of(batch: dict[str, Any]) -> Any:
        batch["global_batch_size"] = global_batch_size
        return partial(loss_function, args, batch, len(micro_batches))

    routing, balancing = context.routing, context.balancing
    with routing.training(), balancing.step(data, micro_batches):
        reports = run_schedule(
            args, model, data, micro_batches, loss_of, forward_only=False, routing=routing, balancing=balancing
        )
    learning_rates = {f"lr-pg_{i}": group["lr"] for i, group in enumerate(optimizer.param_groups)}
    try:
        mismatch = meter.measure(step_id, micro_batches, reports)
    except Exception:  # no step is made, and the expert biases have moved already
        balancing.undo()
        raise
    skipped, grad_norm = _update(context, rollout_id, step_id, data, micro_batches, reports)
    if skipped:
        balancing.undo()
    else:
        context.scheduler.step(increment=global_batch_size)

    metrics = _reduce_reports(args, reports, global_batch_size) if is_last_stage() else {}
    metrics["grad_norm"] = grad_norm
    metrics["global_batch_size"] = global_batch_size
    if skipped:
        metrics["skipped_step"] = 1.0
    metrics |= balancing.step_metrics()
    return {**metrics, **mismatch, **routing.step_metrics(context.device), **learning_rates}


def _update(
    context: StepContext,
    rollout_id: int,
    step_id: int,
    data: RolloutData,
    micro_batches: list[list[int]],
    reports: list[dict[str, Any]],
) -> tuple[bool, float]:
    """Clip and apply the gradients; return (skipped, gradient norm before clipping).

    This is ``ChainedOptimizer.step`` with a look at losses and norm before anything is changed.
    """
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    args, optimizer = context.args, context.optimizer
    if optimizer.prepare_grads():  # fp16: the loss scale was too large; the scaler has lowered it
        align_loss_scales(optimizer)
        return True, math.nan
    grad_norm = float(optimizer.get_grad_norm())
    finite = math.isfinite(grad_norm) and all(bool(report["finite"]) for report in reports)
    if not _everywhere(finite, context.device):
        if args.check_for_nan_in_loss_and_grad:
            context.balancing.undo()
            raise _non_finite_error(rollout_id, step_id, grad_norm, data, micro_batches, reports)
        return True, grad_norm
    for part in optimizer.chained_optimizers:
        parameters = [] if getattr(part, "is_stub_optimizer", False) else part.get_parameters()
        if parameters and part.config.clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=part.config.clip_grad,
                total_norm=grad_norm,
                use_decoupled_grad=getattr(part.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False),
            )
    optimizer.step_with_ready_grads()
    return False, grad_norm


def align_loss_scales(optimizer: ChainedOptimizer) -> None:
    """Give all parts of the optimizer (those of experts, and the rest) the loss scale of the one that lowered it most.

    Each has a separate scaler, which knows only the overflows of that part, but the loss is scaled once.
    """
    scalers: list[Any] = [getattr(part, "grad_scaler", None) for part in optimizer.chained_optimizers]
    dynamic = [scaler for scaler in scalers if hasattr(scaler, "hysteresis")]
    states = [scaler.state_dict() for scaler in dynamic]
    lowest = min(
        range(len(states)),
        key=lambda i: (float(states[i]["scale"]), states[i]["hysteresis_tracker"], states[i]["growth_tracker"]),
        default=0,
    )
    for scaler in dynamic:
        scaler.load_state_dict({**states[lowest], "scale": states[lowest]["scale"].clone()})


def _everywhere(condition: bool, device: torch.device) -> bool:
    flag = torch.tensor([int(condition)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def _non_finite_error(
    rollout_id: int,
    step_id: int,
    grad_norm: float,
    data: RolloutData,
    micro_batches: list[list[int]],
    reports: list[dict[str, Any]],
) -> NonFiniteError:
    """Collect from all ranks which samples and which metrics are not finite (collective) and say so."""
    samples: list[str] = []
    names: set[str] = set()
    for indices, report in zip(micro_batches, reports, strict=False):
        if report["finite"]:
            continue
        bad = ~torch.isfinite(report["values"])
        names.add("loss")
        names.update(name for name, is_bad in zip(["num_tokens", *report["keys"]], bad.tolist(), strict=True) if is_bad)
        flags = report["finite_samples"]
        culprits = [] if flags is None else [i for i, finite in zip(indices, flags.tolist(), strict=True) if not finite]
        samples += [sample_name(data, i) for i in culprits or indices]
    gathered = gather_from_world((samples, sorted(names)))
    all_samples = sorted({sample for part, _ in gathered for sample in part})
    all_names = sorted({name for _, part in gathered for name in part})
    what = f"not finite: {', '.join(all_names)}. Samples: {', '.join(all_samples)}" if all_names else (
        "all losses are finite, so the backward pass produced it"
    )  # fmt: skip
    return NonFiniteError(
        f"rollout {rollout_id}, optimizer step {step_id}: gradient norm {grad_norm}; {what}. The parameters were not "
        "changed. Look at these samples' rewards, masks and log-probs (--save-debug-rollout-data), lower --lr or "
        "--clip-grad; --no-check-for-nan-in-loss-and-grad skips such steps instead"
    )


_MINIMIZED = ("loss", "pg_loss", "value_loss")
_OF_KEPT = (
    "entropy_loss", "kl_loss", "opd_reverse_kl", "train_rollout_logprob_abs_diff", "pg_clipfrac", "ppo_kl",
)  # fmt: skip
"""Measures of the policy loss over the tokens that a correction has left; the others are of all trained tokens."""


def _reduce_reports(args: Args, reports: Sequence[dict[str, Any]], global_batch_size: int) -> dict[str, float]:
    """Sum the micro-batches' reports over DP x CP (collective) and divide by what was summed.

    That is the weight of the tokens that are trained, or of those that a correction has left of them: their number, or
    that of the trajectories that have any. What is minimized is divided as the gradient is, also by trajectories that
    train nothing. Metrics are summed by name. A name that a micro-batch or a rank does not report, as that of a term of
    a user's loss that none of its samples needed, adds nothing to the sum; the divisor is that of the others all the
    same.
    """
    sums: dict[str, list[float]] = {}
    weights = torch.stack([torch.stack([r["weight"], r["kept_weight"]]) for r in reports]).sum(dim=0).tolist()
    flat = iter(torch.cat([report["values"][1:] for report in reports]).tolist())
    for report in reports:
        for name in report["keys"]:
            sums.setdefault(name, []).append(next(flat))
    parts = all_gather_objects((weights, {name: sum(values) for name, values in sums.items()}))
    names = list(dict.fromkeys(name for _, part in parts for name in part))
    totals = {name: sum(part.get(name, 0.0) for _, part in parts) for name in names}
    weight, kept = (sum(column) or 1.0 for column in zip(*(part for part, _ in parts), strict=True))
    divisors = dict.fromkeys(_MINIMIZED, weight if args.calculate_per_token_loss else global_batch_size)
    divisors |= dict.fromkeys(_OF_KEPT, kept)
    return {name: total / divisors.get(name, weight) for name, total in totals.items()}
