"""Prompts, lengths and how long the run is."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

from slime.arguments.errors import ArgumentError


def check(args: Namespace) -> None:
    """Over-sampling, lengths, length of the run and its prompts."""
    _check_sampling(args)
    _check_lengths(args)
    _check_run_length(args)
    _check_prompts(args)
    _check_reward(args)


def _check_sampling(args: Namespace) -> None:
    if args.over_sampling_batch_size is None:
        args.over_sampling_batch_size = args.rollout_batch_size
    if args.over_sampling_batch_size < args.rollout_batch_size:
        raise ArgumentError(
            f"--over-sampling-batch-size {args.over_sampling_batch_size} is below "
            f"--rollout-batch-size {args.rollout_batch_size}; raise it or leave it out"
        )
    if args.rollout_top_k != -1 and args.rollout_top_k < 1:
        raise ArgumentError(f"--rollout-top-k {args.rollout_top_k}: give a number of tokens, or -1 for all")


def _check_lengths(args: Namespace) -> None:
    context = args.rollout_max_context_len
    if context is None:
        return
    if args.rollout_max_prompt_len is None:
        args.rollout_max_prompt_len = context - 1
    if args.rollout_max_prompt_len > context - 1:
        raise ArgumentError(
            f"--rollout-max-prompt-len {args.rollout_max_prompt_len} leaves no token to generate within "
            f"--rollout-max-context-len {context}; at most {context - 1}"
        )


def _check_run_length(args: Namespace) -> None:
    if args.num_rollout is None and args.num_epoch is None:
        raise ArgumentError("how long is the run? Give --num-rollout or --num-epoch")
    if args.num_rollout is None and not args.rollout_global_dataset:
        raise ArgumentError(
            "--num-epoch counts passes over the prompts, of which --disable-rollout-global-dataset has none; "
            "give --num-rollout"
        )


def _check_prompts(args: Namespace) -> None:
    replays = args.load_debug_rollout_data is not None
    if args.prompt_data is None:
        built_in = args.data_source_path.startswith("slime.rollout.data_source.")
        only_evaluates = args.num_rollout == 0
        if args.rollout_global_dataset and built_in and not replays and not only_evaluates:
            raise ArgumentError(
                "--prompt-data is missing; --disable-rollout-global-dataset says that there are no prompts"
            )
        return
    path = re.sub(r"@\[-?\d*:-?\d*\]$", "", args.prompt_data)
    if not replays and Path(path).suffix not in (".jsonl", ".parquet"):
        raise ArgumentError(
            f"--prompt-data {args.prompt_data}: expected a .jsonl or .parquet file, path@[a:b] for a slice"
        )


RM_TYPES = ("remote_rm", "deepscaler", "dapo", "math", "f1", "gpqa", "ifbench", "random")


def _check_reward(args: Namespace) -> None:
    if args.rm_type is None or args.custom_rm_path is not None:
        return
    kind = args.rm_type.strip().removeprefix("boxed_")
    if kind not in RM_TYPES:
        raise ArgumentError(
            f"--rm-type {args.rm_type}: expected one of {', '.join(RM_TYPES)}, or boxed_ and one of them"
        )
    if kind == "ifbench":
        raise ArgumentError(f"--rm-type {args.rm_type} is not available yet in this version; use --custom-rm-path")
    if kind == "remote_rm" and args.rm_url is None:
        raise ArgumentError("--rm-type remote_rm needs --rm-url")
