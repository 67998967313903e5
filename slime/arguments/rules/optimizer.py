"""The optimizer, its learning rate and its weight decay."""

from __future__ import annotations

from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.command_line import flags_where
from slime.arguments.errors import ArgumentError


def check(args: Args) -> None:
    """Refuse what Megatron's optimizer and scheduler would reject; fill in the ends of the weight decay."""
    if args.debug_rollout_only:
        return
    if args.min_lr < 0:
        raise ArgumentError(f"--min-lr {args.min_lr}: expected 0 or more")
    if args.min_lr > args.lr:
        raise ArgumentError(f"--min-lr {args.min_lr} is above --lr {args.lr}; lower it")
    if args.lr_warmup_init > args.lr:
        raise ArgumentError(f"--lr-warmup-init {args.lr_warmup_init} is above --lr {args.lr}; lower it")
    _check_adam(args)
    _check_schedule(args)
    _derive_weight_decay(args)
    _check_state(args)
    for flag in flags_where(lambda traits: traits.dtype):
        option, value = flag.option, getattr(args, flag.dest)
        if value != "fp32" and not args.use_precision_aware_optimizer:
            raise ArgumentError(
                f"{option} {value} needs --use-precision-aware-optimizer; add it, or leave {option} out"
            )


def train_steps(args: Args) -> int | None:
    """Optimizer steps of the whole run; None while its length is not known."""
    if not args.num_rollout or not args.global_batch_size:
        return None
    return int(args.num_rollout * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size)


def _check_adam(args: Args) -> None:
    if args.optimizer in ("muon", "dist_muon"):
        raise ArgumentError(
            f"--optimizer {args.optimizer}: Megatron's Muon excludes its distributed optimizer, whose buffers weights "
            "are pushed, offloaded and saved from, and does not fit the emerging_optimizers on PyPI; use adam"
        )
    if args.optimizer != "adam":
        raise ArgumentError(
            f"--optimizer {args.optimizer}: expected adam, the only one whose state Megatron divides among ranks "
            "(--use-distributed-optimizer, which is always on); leave it out"
        )
    for name in ("adam_beta1", "adam_beta2"):
        value = getattr(args, name)
        if not 0 <= value < 1:
            raise ArgumentError(f"--{name.replace('_', '-')} {value}: expected at least 0 and less than 1")
    if args.adam_eps < 0:
        raise ArgumentError(f"--adam-eps {args.adam_eps}: expected 0 or more")


def _check_schedule(args: Args) -> None:
    fraction, warmup = args.lr_warmup_fraction, args.lr_warmup_iters
    if fraction is not None and warmup != 0:
        raise ArgumentError("--lr-warmup-fraction and --lr-warmup-iters exclude each other; leave one out")
    if fraction is not None and not 0 <= fraction < 1:
        raise ArgumentError(f"--lr-warmup-fraction {fraction}: expected a part of the decay, from 0 to below 1")
    if warmup < 0 or (args.lr_decay_iters is not None and args.lr_decay_iters < 1):
        raise ArgumentError(
            f"--lr-warmup-iters {warmup} must be at least 0 and --lr-decay-iters {args.lr_decay_iters} at least 1"
        )
    last_part = args.lr_wsd_decay_iters if args.lr_decay_style == "WSD" else 0
    if last_part is None:
        raise ArgumentError("--lr-decay-style WSD needs --lr-wsd-decay-iters, the steps of its last part")
    steps = train_steps(args)
    decay, which = args.lr_decay_iters, "--lr-decay-iters"
    if decay is None and steps is not None:
        decay, which = max(1, steps), "the length of the run in optimizer steps,"
    if decay is not None and warmup >= decay and warmup > 0:
        raise ArgumentError(
            f"--lr-warmup-iters {warmup} must be below {which} {decay}; lower it, or give a longer --lr-decay-iters"
        )
    if decay is not None and last_part > decay:
        raise ArgumentError(
            f"--lr-wsd-decay-iters {last_part}, the last part of the schedule, must not be above {which} {decay}"
        )


def _derive_weight_decay(args: Args) -> None:
    if args.start_weight_decay is None:
        args.start_weight_decay = args.weight_decay
    if args.end_weight_decay is None:
        args.end_weight_decay = args.weight_decay
    start, end = args.start_weight_decay, args.end_weight_decay
    if start < 0 or end < start:
        raise ArgumentError(
            f"--start-weight-decay {start} and --end-weight-decay {end}: expected 0 or more, and the end not below the "
            "start (each is --weight-decay unless given)"
        )
    if start != end and args.weight_decay_incr_style == "constant":
        raise ArgumentError(
            f"--start-weight-decay {start} and --end-weight-decay {end} differ, but --weight-decay-incr-style is "
            "constant; use linear or cosine, or leave one of them out"
        )


LARGE_RATE = 0.01
"""With Adam, of which every step is about as large as the rate: weights are mostly below 0.1."""


def _check_state(args: Args) -> None:
    if args.lr > LARGE_RATE and args.optimizer == "adam":
        diagnostics.warn(
            args, f"--lr {args.lr}: a step moves every weight by about as much, which no model survives; usual is 1e-6"
        )
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise ArgumentError(
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other; leave one out"
        )
    if args.use_stateless_adam and not args.no_save_optim:
        raise ArgumentError("--use-stateless-adam has no state to save and needs --no-save-optim; add it")
    for option in ("--optimizer-cpu-offload", "--use-precision-aware-optimizer"):
        if args.use_stateless_adam and getattr(args, option[2:].replace("-", "_")):
            raise ArgumentError(f"{option} is about moments, of which --use-stateless-adam keeps none; leave one out")
    if args.use_stateless_adam and args.reset_optimizer_states:
        diagnostics.warn(
            args, "--reset-optimizer-states has no effect with --use-stateless-adam, which keeps no states"
        )
