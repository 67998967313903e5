"""Evaluation data sets and the values evaluation takes over from the rollout."""

from __future__ import annotations

import logging
from argparse import Namespace

from slime.arguments.errors import ArgumentError
from slime.arguments.files.eval_config import FOR_PLUGINS, datasets_from_args
from slime.arguments.rules.debug import DEFAULT_ROLLOUT

logger = logging.getLogger(__name__)


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
    if args.eval_function_path == DEFAULT_ROLLOUT:
        _check_built_in(args)


def _check_built_in(args: Namespace) -> None:
    """The built-in evaluation scores single samples, and leaves some keys of the file to plug-ins."""
    if args.group_rm and args.eval_interval is not None and not args.debug_train_only:
        raise ArgumentError(
            "--group-rm scores groups, of which the built-in evaluation has none; give --eval-function-path, or leave "
            "--eval-interval out"
        )
    for dataset in args.eval_datasets:
        unread = [name for name in FOR_PLUGINS if getattr(dataset, name) is not None]
        if unread:
            logger.warning(
                "--eval-config, data set %s: %s without effect in the built-in evaluation (plug-ins find the values in "
                "args.eval_datasets)",
                dataset.name,
                ", ".join(unread),
            )
