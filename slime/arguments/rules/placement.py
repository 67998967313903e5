"""Slots of training and inference."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.errors import ArgumentError


def apply_offload_shorthand(args: Namespace) -> None:
    """``--offload`` is both offloads; the attribute goes away."""
    if args.offload:
        for name in ("offload_train", "offload_rollout"):
            if getattr(args, name) is False:
                raise ArgumentError(f"--offload and --no-{name.replace('_', '-')} contradict each other; leave one out")
            setattr(args, name, True)
    del args.offload
    args.rollout_external = args.rollout_external_engine_addrs is not None


def fit_rollout_only(args: Namespace) -> None:
    """Without a trainer all slots generate."""
    if not args.debug_rollout_only:
        return
    actor_slots = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.rollout_num_gpus is None:
        if not args.colocate:
            raise ArgumentError("--debug-rollout-only needs --rollout-num-gpus: how many slots generate?")
        args.rollout_num_gpus = actor_slots
    elif args.rollout_num_gpus == 0:
        args.actor_num_gpus_per_node = args.actor_num_nodes = 0
    else:
        args.actor_num_gpus_per_node = min(8, args.rollout_num_gpus)
        args.actor_num_nodes = args.rollout_num_gpus // args.actor_num_gpus_per_node
    args.colocate = args.offload_train = args.offload_rollout = False


def share_or_split(args: Namespace) -> None:
    """Colocation implies offloading (explicit ``--no-offload-*`` holds); otherwise inference needs its own slots."""
    actor_slots = args.actor_num_nodes * args.actor_num_gpus_per_node
    if not args.debug_rollout_only and actor_slots == 0:
        raise ArgumentError(
            f"--actor-num-nodes {args.actor_num_nodes} x --actor-num-gpus-per-node {args.actor_num_gpus_per_node} "
            "leaves no slot to train on; give at least 1 of each, or --debug-rollout-only"
        )
    if args.colocate:
        args.offload_train = True if args.offload_train is None else args.offload_train
        args.offload_rollout = True if args.offload_rollout is None else args.offload_rollout
        if args.rollout_num_gpus is None:
            args.rollout_num_gpus = actor_slots
    elif args.rollout_num_gpus is None and not args.debug_train_only:
        raise ArgumentError(
            "--rollout-num-gpus is missing: how many slots generate? With --colocate the training slots do; "
            "with --debug-train-only none does"
        )
    args.rollout_num_engines = (args.rollout_num_gpus or 0) // args.rollout_num_gpus_per_engine
    args.offload_train = bool(args.offload_train)
    args.offload_rollout = bool(args.offload_rollout)
    if args.use_critic:
        args.offload_train = True
    if args.offload_train:
        args.disable_grad_buffers_cpu_backup = args.disable_param_buffers_cpu_backup = True


def check_engines(args: Namespace) -> None:
    """Inference slots must make whole engines, and an engine must fill nodes evenly."""
    if args.debug_train_only or not args.rollout_num_gpus:
        return
    total, per_engine = args.rollout_num_gpus, args.rollout_num_gpus_per_engine
    if total % per_engine != 0:
        raise ArgumentError(
            f"--rollout-num-gpus {total} is no multiple of --rollout-num-gpus-per-engine {per_engine}; "
            f"use {total - total % per_engine or per_engine} or {total + per_engine - total % per_engine} slots"
        )
    if per_engine > args.num_gpus_per_node and per_engine % args.num_gpus_per_node != 0:
        raise ArgumentError(
            f"--rollout-num-gpus-per-engine {per_engine} spans nodes and must be a multiple of "
            f"--num-gpus-per-node {args.num_gpus_per_node}"
        )
