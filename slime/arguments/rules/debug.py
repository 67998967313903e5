"""Partial loops and dumps."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.errors import ArgumentError

DEFAULT_ROLLOUT = "slime.rollout.sglang_rollout.generate_rollout"


def expand_dumps(args: Namespace) -> None:
    """``--dump-details DIR`` sets both dump paths; the two must differ and must tell rollouts apart."""
    if args.dump_details is not None:
        args.save_debug_rollout_data = f"{args.dump_details}/rollout_data/{{rollout_id}}.pt"
        args.save_debug_train_data = f"{args.dump_details}/train_data/{{rollout_id}}.pt"
    if args.save_debug_rollout_data is not None and args.save_debug_rollout_data == args.save_debug_train_data:
        raise ArgumentError(
            f"--save-debug-rollout-data and --save-debug-train-data are both {args.save_debug_rollout_data}: "
            "one would overwrite the other; give them different paths"
        )
    for name in ("save_debug_rollout_data", "save_debug_train_data"):
        template = getattr(args, name)
        if template is not None and "{rollout_id}" not in template:
            raise ArgumentError(
                f"--{name.replace('_', '-')} {template} has no {{rollout_id}} in it, so every rollout would overwrite "
                "the last one; write for example dumps/{rollout_id}.pt"
            )
    if args.load_debug_rollout_data_subsample is not None and args.load_debug_rollout_data is None:
        raise ArgumentError("--load-debug-rollout-data-subsample needs --load-debug-rollout-data")
    if args.load_forge_rollout_data is not None and args.rollout_function_path == DEFAULT_ROLLOUT:
        raise ArgumentError(
            f"--load-forge-rollout-data {args.load_forge_rollout_data} is not read by {DEFAULT_ROLLOUT}; "
            "add --rollout-function-path slime.rollout.forge_load.generate_rollout"
        )


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
