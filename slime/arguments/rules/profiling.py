"""Profiles and memory records."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments import unchecked
from slime.arguments.errors import ArgumentError


def check(args: Namespace) -> None:
    """Refuse windows that hold nothing and records that never end."""
    start, end = args.profile_step_start, args.profile_step_end
    if args.use_pytorch_profiler and end <= start:
        raise ArgumentError(
            f"--profile-step-start {start} and --profile-step-end {end}: expected an end above the start; rollouts "
            "from the first to before the second are profiled"
        )
    if args.use_pytorch_profiler and args.num_rollout is not None and start >= args.num_rollout:
        unchecked.warn(
            args,
            f"--profile-step-start {start} is not reached by --num-rollout {args.num_rollout}: nothing is profiled",
        )
    if args.record_memory_history and args.memory_recorder == "memray" and args.memory_snapshot_num_steps is None:
        raise ArgumentError(
            "--memory-recorder memray writes until it is stopped, many times the size of the run's memory; say after "
            "how many rollouts with --memory-snapshot-num-steps"
        )
