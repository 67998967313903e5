"""Partial loops and dumps."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from slime.arguments import unchecked
from slime.arguments.errors import ArgumentError
from slime.arguments.rules.loop import GENERATE_WITH_ENGINES

DEFAULT_ROLLOUT = "slime.rollout.sglang_rollout.generate_rollout"
FORGE_ROLLOUT = "slime.rollout.forge_load.generate_rollout"


def expand_dumps(args: Namespace) -> None:
    """``--dump-details DIR`` sets both dump paths, which must differ; what concerns a replay needs one."""
    if args.dump_details is not None:
        args.save_debug_rollout_data = f"{args.dump_details}/rollout_data/{{rollout_id}}.pt"
        args.save_debug_train_data = f"{args.dump_details}/train_data/{{rollout_id}}.pt"
    if args.save_debug_rollout_data is not None and args.save_debug_rollout_data == args.save_debug_train_data:
        raise ArgumentError(
            f"--save-debug-rollout-data and --save-debug-train-data are both {args.save_debug_rollout_data}: "
            "one would overwrite the other; give them different paths"
        )
    if args.load_debug_rollout_data_subsample is not None and args.load_debug_rollout_data is None:
        raise ArgumentError(
            "--load-debug-rollout-data-subsample takes a part of the dumps of --load-debug-rollout-data; add that one"
        )
    if args.load_forge_rollout_data is not None and args.rollout_function_path == DEFAULT_ROLLOUT:
        raise ArgumentError(
            f"--load-forge-rollout-data {args.load_forge_rollout_data} is not read by {DEFAULT_ROLLOUT}; "
            f"add --rollout-function-path {FORGE_ROLLOUT}"
        )
    if args.rollout_function_path == FORGE_ROLLOUT and args.load_forge_rollout_data is None:
        raise ArgumentError(f"--rollout-function-path {FORGE_ROLLOUT} reads dumps and needs --load-forge-rollout-data")


def choose_loop(args: Namespace) -> None:
    """Dumps are trained on without engines; generation alone and training alone exclude each other."""
    if args.load_debug_rollout_data is not None and args.debug_rollout_only:
        raise ArgumentError(
            "--load-debug-rollout-data trains on dumps and --debug-rollout-only starts no trainer; leave one out"
        )
    if args.load_debug_rollout_data is not None:
        args.debug_train_only = True
    if args.debug_rollout_only and args.debug_train_only:
        raise ArgumentError(
            "--debug-rollout-only and --debug-train-only exclude each other; leave both out for the whole loop"
        )
    if args.debug_rollout_only and args.check_weight_update_equal:
        raise ArgumentError(
            "--check-weight-update-equal overwrites the engines' weights before the first sync, and with "
            "--debug-rollout-only there is none; leave one out"
        )
    generates = args.rollout_function_path in GENERATE_WITH_ENGINES
    if args.debug_train_only and args.load_debug_rollout_data is None and generates:
        unchecked.warn(
            args,
            f"--debug-train-only starts no engines, with which {args.rollout_function_path} generates: give "
            "--load-debug-rollout-data, or a --rollout-function-path that needs none",
        )


def check_replay(args: Namespace) -> None:
    """The first dump must be there, and should not be the only one."""
    template = args.load_debug_rollout_data
    if template is None:
        return
    if "{rollout_id}" not in template and args.num_rollout != 1:
        unchecked.warn(
            args, f"--load-debug-rollout-data {template} has no {{rollout_id}} in it: every rollout trains on that dump"
        )
    if args.start_rollout_id is None:
        return  # the checkpoint says where to start
    first = template.format(rollout_id=args.start_rollout_id)
    if args.num_rollout != 0 and not Path(first).is_file():
        unchecked.missing(
            args, f"--load-debug-rollout-data {template}: the first dump would be {first}, and there is no such file"
        )
