"""Built-in rollout functions, what ``train.py`` and ``train_async.py`` cannot run with them, and staleness."""

from __future__ import annotations

from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.command_line import flags_where
from slime.arguments.errors import ArgumentError
from slime.arguments.groups.rollout import FULLY_ASYNC_ROLLOUT
from slime.arguments.rules.checkpoints import needs_reference

SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
ENVIRONMENT_GENERATE = "slime.rollout.environments.generate"


def refuse_impossible_loop(args: Args, *, overlap: bool) -> None:
    """Raise ``ArgumentError`` for flags that ``train.py``, with ``overlap`` ``train_async.py``, cannot follow."""
    if not overlap:
        if args.update_weights_interval != 1:
            raise ArgumentError(
                f"--update-weights-interval {args.update_weights_interval} has no effect in train.py, which takes the "
                "weights to the engines after every rollout; use train_async.py or leave it out"
            )
        if generates_always(args) and not args.debug_rollout_only:
            raise ArgumentError(
                f"--rollout-function-path {FULLY_ASYNC_ROLLOUT} generates while the trainer trains, which train.py "
                "does not; use train_async.py"
            )
        if args.max_staleness is not None and not _leaves_groups(args):
            diagnostics.warn(
                args,
                f"--max-staleness {args.max_staleness} has no effect in train.py, which trains every rollout before it "
                "begins the next one",
            )
        return
    # With a critic --offload-train is on: actor and critic take turns on slots that engines have no part in.
    flags = flags_where(lambda traits: traits.takes_turns)
    asked = [f.option for f in flags if getattr(args, f.dest) and not (args.use_critic and f.dest == "offload_train")]
    if asked:
        raise ArgumentError(
            f"{asked[0]} makes engines and trainers take turns, but train_async.py generates while it trains; use "
            "train.py, or give each slots and memory of its own (--actor-num-gpus-per-node, --rollout-num-gpus)"
        )
    limit, interval = args.max_staleness, args.update_weights_interval
    refresh = args.ref_update_interval
    if (
        args.release_train
        and refresh is not None
        and needs_reference(args)
        and refresh % interval
        and refresh % (args.save_interval or 1)
    ):
        raise ArgumentError(
            f"--release-train: the reference of --ref-update-interval {refresh} is loaded from a checkpoint, and "
            f"there is none after every {refresh} rollouts; use a multiple of --update-weights-interval {interval} or "
            f"of --save-interval {args.save_interval}"
        )
    if limit is not None and limit < interval and not generates_always(args):
        raise ArgumentError(
            f"--max-staleness {limit}: train_async.py ends every rollout before the weight sync that precedes its "
            f"training, so those of --rollout-function-path {args.rollout_function_path} lag {interval}; use at least "
            f"{interval}, or {FULLY_ASYNC_ROLLOUT}"
        )


def _leaves_groups(args: Args) -> bool:
    """Return True if a rollout may leave groups for later ones."""
    return (
        args.partial_rollout
        or args.over_sampling_batch_size > args.rollout_batch_size
        or args.dynamic_sampling_filter_path is not None
    )


def generates_always(args: Args) -> bool:
    """Return True if the rollout function generates between its calls too, and during weight syncs."""
    return bool(args.rollout_function_path == FULLY_ASYNC_ROLLOUT)


def check_staleness(args: Args) -> None:
    """Refuse a ``--max-staleness`` that nothing enforces, or that no schedule can keep."""
    limit, interval = args.max_staleness, args.update_weights_interval
    if limit is None:
        return
    if args.rollout_function_path == SFT_ROLLOUT:
        raise ArgumentError(
            f"--max-staleness {limit} bounds how old generated tokens are, and --rollout-function-path {SFT_ROLLOUT} "
            "generates none; leave it out"
        )
    if limit < interval - 1:
        raise ArgumentError(
            f"--max-staleness {limit} cannot be kept with --update-weights-interval {interval}: the last rollout "
            f"before a weight sync is trained on tokens that lag {interval - 1} steps; use at least {interval - 1}, or "
            "sync more often"
        )
