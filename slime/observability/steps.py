"""The place of a rollout on the axis of its metrics."""

from __future__ import annotations

from argparse import Namespace


def rollout_step(args: Namespace, rollout_id: int) -> int:
    """Return the place on the ``rollout/step`` and ``eval/step`` axes: the rollout's id.

    With ``--wandb-always-use-train-step``: the optimizer steps that the samples of earlier rollouts were meant for.
    """
    if not args.wandb_always_use_train_step:
        return rollout_id
    return int(rollout_id * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size)
