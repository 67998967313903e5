"""Batch sizes: what one rollout yields must be what the optimiser steps consume."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.errors import ArgumentError


def derive_global_batch_size(args: Namespace) -> None:
    """``rollout_batch_size * n_samples_per_prompt == global_batch_size * num_steps_per_rollout``."""
    if args.debug_rollout_only and args.num_steps_per_rollout is None:
        return
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    made = (
        f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt} "
        f"= {samples} samples per rollout"
    )
    steps = args.num_steps_per_rollout
    if steps is None:
        if args.global_batch_size is None:
            raise ArgumentError(
                f"the batch size is missing: {made}; give --global-batch-size, or --num-steps-per-rollout to split them"
            )
        fans_out = args.custom_generate_function_path or args.custom_convert_samples_to_train_data_path
        if samples < args.global_batch_size and not fans_out:
            raise ArgumentError(
                f"{made}, fewer than --global-batch-size {args.global_batch_size}: no optimiser step could be made; "
                "lower it or generate more"
            )
        return
    if samples % steps != 0:
        raise ArgumentError(f"{made} cannot be split into --num-steps-per-rollout {steps} equal steps")
    if args.global_batch_size not in (None, samples // steps):
        raise ArgumentError(
            f"{made}, but --global-batch-size {args.global_batch_size} x --num-steps-per-rollout {steps} "
            f"= {args.global_batch_size * steps}; use --global-batch-size {samples // steps} or leave it out"
        )
    args.global_batch_size = samples // steps


def check_micro_batches(args: Namespace) -> None:
    """Dynamic batches need their token limit."""
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None and not args.debug_rollout_only:
        raise ArgumentError("--use-dynamic-batch-size needs --max-tokens-per-gpu: how many tokens fit?")
    if args.balance_by_flops and not args.use_dynamic_batch_size:
        raise ArgumentError("--balance-by-flops forms micro-batches itself and needs --use-dynamic-batch-size")
    if args.balance_by_flops:
        args.balance_data = True
    if args.log_probs_max_tokens_per_gpu is None:
        args.log_probs_max_tokens_per_gpu = args.max_tokens_per_gpu
    if args.log_probs_max_tokens_per_gpu != args.max_tokens_per_gpu:
        raise ArgumentError(
            f"--log-probs-max-tokens-per-gpu {args.log_probs_max_tokens_per_gpu} differs from --max-tokens-per-gpu "
            f"{args.max_tokens_per_gpu}, but the log-prob pass uses the micro-batches of training; leave it out"
        )
    if args.log_probs_chunk_size != -1 and args.log_probs_chunk_size <= 0:
        raise ArgumentError(
            f"--log-probs-chunk-size {args.log_probs_chunk_size}: give tokens per chunk, or -1 for no chunks"
        )
