"""How far what is trained on may lag behind the trainer."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.errors import ArgumentError
from slime.arguments.plan.batch import DEFAULT_ROLLOUT, FULLY_ASYNC_ROLLOUT, SFT_ROLLOUT


def check(args: Namespace) -> None:
    """Refuse a ``--max-staleness`` that nothing enforces, or that no schedule can keep."""
    limit, interval = args.max_staleness, args.update_weights_interval
    if limit is None:
        return
    path = args.rollout_function_path
    if path in (DEFAULT_ROLLOUT, SFT_ROLLOUT):
        raise ArgumentError(
            f"--max-staleness {limit} bounds what the fully asynchronous rollout begins and trains on, and "
            f"--rollout-function-path {path} does not read it; use {FULLY_ASYNC_ROLLOUT}, or leave it out"
        )
    if limit < interval - 1:
        raise ArgumentError(
            f"--max-staleness {limit} cannot be kept with --update-weights-interval {interval}: the last rollout "
            f"before a weight sync is trained on tokens that lag {interval - 1} steps; use at least {interval - 1}, or "
            "sync more often"
        )
    if limit < interval and path != FULLY_ASYNC_ROLLOUT:
        raise ArgumentError(
            f"--max-staleness {limit}: train_async.py ends every rollout before the weight sync that precedes its "
            f"training, so those of --rollout-function-path {path} lag {interval} or more; use at least {interval}"
        )
