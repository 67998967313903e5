"""Evaluation data sets and the values evaluation takes over from the rollout."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments import unchecked
from slime.arguments.errors import ArgumentError
from slime.arguments.files.eval_config import FOR_PLUGINS, datasets_from_args
from slime.arguments.rules import prompts
from slime.arguments.rules.loop import GENERATE_WITH_ENGINES


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
    if args.eval_interval is not None and not args.debug_train_only:
        _check_top_k(args)
        if args.eval_function_path in GENERATE_WITH_ENGINES:
            _check_built_in(args)


def _check_top_k(args: Namespace) -> None:
    if args.eval_top_k is not None and args.eval_top_k != -1 and args.eval_top_k < 1:
        raise ArgumentError(f"--eval-top-k {args.eval_top_k}: give a number of tokens, or -1 for all")


def _check_built_in(args: Namespace) -> None:
    """The built-in evaluation reads files, scores single samples, and leaves some keys of the file to plug-ins."""
    if args.group_rm:
        raise ArgumentError(
            "--group-rm scores groups, of which the built-in evaluation has none; give --eval-function-path, or leave "
            "--eval-interval out"
        )
    option = "--eval-prompt-data" if args.eval_config is None else f"--eval-config {args.eval_config}, data set"
    for dataset in args.eval_datasets:
        custom = dataset.custom_generate_function_path or args.custom_generate_function_path
        if dataset.max_response_len is None and args.eval_max_context_len is None and not custom:
            raise ArgumentError(
                f"{option} {dataset.name}: how long may a response get? Give --eval-max-response-len or "
                "--rollout-max-response-len"
            )
        prompts.check_file(args, f"{option} {dataset.name} {dataset.path}", dataset.path)
        unread = [name for name in FOR_PLUGINS if getattr(dataset, name) is not None]
        if unread:
            unchecked.warn(
                args,
                f"--eval-config, data set {dataset.name}: {', '.join(unread)} without effect in the built-in "
                "evaluation (plug-ins find the values in args.eval_datasets)",
            )
