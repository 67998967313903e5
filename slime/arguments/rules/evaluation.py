"""Evaluation data sets and the values evaluation takes over from the rollout."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.errors import ArgumentError
from slime.arguments.files.eval_config import datasets_from_args


def resolve_datasets(args: Namespace) -> None:
    """Set ``args.eval_datasets`` and rewrite ``args.eval_prompt_data`` to the flat name/path list, or None."""
    if args.eval_reward_key is None:
        args.eval_reward_key = args.reward_key
    args.eval_datasets = datasets_from_args(args)
    pairs = [word for dataset in args.eval_datasets for word in (dataset.name, dataset.path)]
    args.eval_prompt_data = pairs or None
    if args.eval_interval is not None and not args.eval_datasets and not args.debug_train_only:
        raise ArgumentError(
            f"--eval-interval {args.eval_interval} needs data: give --eval-prompt-data NAME PATH or --eval-config FILE"
        )


def fall_back_to_rollout(args: Namespace) -> None:
    """Function and context length of the rollout hold for evaluation unless it has its own."""
    if args.eval_function_path is None:
        args.eval_function_path = args.rollout_function_path
    if args.eval_max_context_len is None:
        args.eval_max_context_len = args.rollout_max_context_len
