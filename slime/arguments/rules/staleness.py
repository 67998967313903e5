"""How far what is trained on may lag behind the trainer."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.errors import ArgumentError
from slime.arguments.rules.loop import SFT_ROLLOUT


def check(args: Namespace) -> None:
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
