"""Defaults that depend on the device: decided once the cluster is known, not while parsing."""

from __future__ import annotations

import math
import os
from typing import Literal

from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.command_line import flags_where
from slime.arguments.errors import ArgumentError
from slime.arguments.placement import engines_of

PUSH_MARGIN_MINUTES = 2


def finalize_for_device(args: Args, device_type: Literal["cpu", "cuda"]) -> None:
    """Set what depends on the device, in place; ``args.device_type`` is set too.

    What was given on the command line holds; what cannot work on the device raises ``ArgumentError``.
    """
    args.device_type = device_type
    args.variable_seq_lengths = True
    given: frozenset[str] = args.explicit_flags
    if device_type == "cpu":
        _finalize_for_cpu(args, given)
    else:  # which fused kernels exist is found out on the training nodes: this may be a head node without them
        args.bf16 = not (args.fp16 or args.fp32)
        if args.use_nccl_ub and args.offload_train:
            raise ArgumentError(
                "--use-nccl-ub registers the memory of weights and gradients with NCCL, and --offload-train (part of "
                "--colocate) frees it; leave one of them out"
            )
        if args.update_weight_transport == "p2p" and not (args.debug_train_only or args.debug_rollout_only):
            raise ArgumentError(
                "--update-weight-transport p2p: weights are written into host memory over TCP, not tested with "
                "engines on GPUs; leave it out: NCCL then carries them from GPU to GPU"
            )
        _check_caches_are_unregistered(args)
        _check_handles_of_memory(args)
        if not (args.debug_train_only or args.debug_rollout_only):
            _outlast_pushes(args, given)
    args.bias_activation_fusion = args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion
    args.nccl_ub = args.use_nccl_ub
    args.accumulate_allreduce_grads_in_fp32 |= args.bf16 and not args.grad_reduce_in_bf16
    args.grad_reduce_in_fp32 = args.accumulate_allreduce_grads_in_fp32


def _check_handles_of_memory(args: Args) -> None:
    """Colocated engines open the trainer's memory by its handle."""
    if not args.colocate or args.update_weight_transport == "disk":
        return
    environment = {**os.environ, **(args.train_env_vars or {})}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
            raise ArgumentError(
                f"{name}={environment[name]}: engines of --colocate open the trainer's memory, and that of expandable "
                "segments only with rights (pidfd_getfd) that containers lack; unset it, or add "
                "--update-weight-transport disk"
            )


def _outlast_pushes(args: Args, given: frozenset[str]) -> None:
    """Ranks wait in a collective while one of them pushes weights: NCCL's watchdog must give the push its time."""
    needed = math.ceil(args.weight_sync_timeout / 60) + PUSH_MARGIN_MINUTES
    if args.distributed_timeout_minutes >= needed:
        return
    if "distributed_timeout_minutes" in given:
        diagnostics.warn(
            args,
            f"--distributed-timeout-minutes {args.distributed_timeout_minutes}: the trainers may be ended before a "
            f"weight sync is given up after --weight-sync-timeout {args.weight_sync_timeout:g} s; give {needed}",
        )
    else:
        args.distributed_timeout_minutes = needed


def _check_caches_are_unregistered(args: Args) -> None:
    """The network must not know memory of a GPU that is released for the trainer."""
    for plan in engines_of(args):
        given = args.sglang_disaggregation_transfer_backend
        backend = plan.overrides.get("disaggregation_transfer_backend", given)
        disaggregated = plan.worker_type in ("prefill", "decode")
        if plan.offload and disaggregated and backend not in ("mooncake", "mooncake_tcp"):
            raise ArgumentError(
                f"--sglang-disaggregation-transfer-backend {backend}: SGLang leaves the cache of {plan} registered "
                "when its memory is released for the trainer, and unregisters it with mooncake alone; use mooncake, "
                "or --no-offload-rollout"
            )


def _finalize_for_cpu(args: Args, given: frozenset[str]) -> None:
    for flag in flags_where(lambda traits: traits.without_gpu):
        holds, found = flag.dest in given, flag.traits.without_gpu
        if found is None or (found.given_holds and holds):
            continue
        if found.refuses is not None and holds and getattr(args, flag.dest) != found.value:
            raise ArgumentError(f"{found.refuses} needs a GPU and there is none; leave it out")
        setattr(args, flag.dest, found.value)
    for flag in flags_where(lambda traits: traits.gpu_values):
        if flag.dest in given and (seen := getattr(args, flag.dest)) in flag.traits.gpu_values:
            raise ArgumentError(f"{flag.option} {seen} needs a GPU and there is none; leave it out")
    if args.record_memory_history and args.memory_recorder == "torch":
        raise ArgumentError(
            "--record-memory-history: torch records the memory of a GPU, and there is none; use --memory-recorder "
            "memray, which records the host's"
        )
    args.transformer_impl = "local"
