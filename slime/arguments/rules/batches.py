"""Batch sizes: what one rollout yields must be what the optimiser steps consume."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments import unchecked
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
            given = "" if "rollout_batch_size" in unchecked.needed(args) else f"{made}; "
            unchecked.need(
                args,
                "global_batch_size",
                f"the batch size is missing: {given}give --global-batch-size, or --num-steps-per-rollout to split them",
                stand_in=samples,
            )
        if samples < args.global_batch_size and not _makes_its_own_number(args):
            raise ArgumentError(
                f"{made}, fewer than --global-batch-size {args.global_batch_size}: no optimiser step could be made; "
                "lower it or generate more"
            )
        if not _makes_its_own_number(args) and not args.debug_rollout_only and args.load_debug_rollout_data is None:
            _warn_of_left_over(args, made, samples)
        return
    if samples % steps != 0:
        raise ArgumentError(f"{made} cannot be split into --num-steps-per-rollout {steps} equal steps")
    if args.global_batch_size not in (None, samples // steps):
        raise ArgumentError(
            f"{made}, but --global-batch-size {args.global_batch_size} x --num-steps-per-rollout {steps} "
            f"= {args.global_batch_size * steps}; use --global-batch-size {samples // steps} or leave it out"
        )
    args.global_batch_size = samples // steps


def _warn_of_left_over(args: Namespace, made: str, samples: int) -> None:
    size = args.global_batch_size
    left, rollouts = samples % size, args.num_rollout
    if not left or rollouts == 0:
        return
    at_the_end = (rollouts - (args.start_rollout_id or 0)) * samples % size if rollouts else None
    lost = f", and the last {at_the_end} of the run train no step" if at_the_end else ""
    unchecked.warn(
        args,
        f"{made}, no multiple of --global-batch-size {size}: {left} of the first rollout wait and are trained on after "
        f"the next one, when the weights are no longer those that made them{lost}; a rollout is divided evenly by "
        f"--global-batch-size {_nearest_divisor(samples, size)}, or by --num-steps-per-rollout",
    )


def _nearest_divisor(number: int, to: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - to))


def _makes_its_own_number(args: Namespace) -> bool:
    """Whether a plug-in decides how many rollouts there are. A generate function does not: what it makes of one prompt
    copy counts as one."""
    own_loop = not args.rollout_function_path.startswith("slime.")
    return own_loop or args.custom_convert_samples_to_train_data_path is not None


def check_micro_batches(args: Namespace) -> None:
    """Dynamic batches need their token limit; the log-prob pass shares the micro-batches of training."""
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None and not args.debug_rollout_only:
        raise ArgumentError("--use-dynamic-batch-size needs --max-tokens-per-gpu: how many tokens fit?")
    if args.balance_by_flops and not args.use_dynamic_batch_size:
        raise ArgumentError("--balance-by-flops forms micro-batches itself and needs --use-dynamic-batch-size")
    if args.balance_by_flops:
        args.balance_data = True
    if args.log_probs_max_tokens_per_gpu is None:
        args.log_probs_max_tokens_per_gpu = args.max_tokens_per_gpu
    if args.log_probs_max_tokens_per_gpu != args.max_tokens_per_gpu:
        unchecked.warn(
            args,
            f"--log-probs-max-tokens-per-gpu {args.log_probs_max_tokens_per_gpu} has no effect: the log-prob pass uses "
            f"the micro-batches of training (--max-tokens-per-gpu {args.max_tokens_per_gpu}); leave it out",
        )
    if args.log_probs_chunk_size != -1 and args.log_probs_chunk_size <= 0:
        raise ArgumentError(
            f"--log-probs-chunk-size {args.log_probs_chunk_size}: give the largest number of tokens per chunk, or -1"
        )
    _warn_of_long_samples(args)


def _warn_of_long_samples(args: Namespace) -> None:
    if not args.use_dynamic_batch_size or args.debug_rollout_only or not args.rollout_max_response_len:
        return
    cp = max(1, args.context_parallel_size)
    limit = args.max_tokens_per_gpu * cp
    if args.rollout_max_response_len >= limit:
        unchecked.warn(
            args,
            f"--rollout-max-response-len {args.rollout_max_response_len} and its prompt are more than "
            f"--max-tokens-per-gpu {args.max_tokens_per_gpu} x --context-parallel-size {cp} = {limit} tokens: such a "
            "sample makes a micro-batch of its own, above that limit",
        )
