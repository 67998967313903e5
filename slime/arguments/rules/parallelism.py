"""Parallel sizes: what divides the training slots, the heads, the vocabulary and the batch."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from slime.arguments import unchecked
from slime.arguments.errors import ArgumentError
from slime.arguments.rules import pipeline

ALLGATHER_ARCHITECTURES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")


def derive_sizes(args: Namespace) -> None:
    """Set ``data_parallel_size``; slots, heads and query groups must divide."""
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    if min(tp, pp, cp) < 1:
        raise ArgumentError(
            f"--tensor-model-parallel-size {tp}, --pipeline-model-parallel-size {pp}, --context-parallel-size {cp}: "
            "each must be at least 1"
        )
    if args.world_size % (tp * pp * cp) != 0:
        raise ArgumentError(
            f"{args.world_size} training slots (--actor-num-nodes {args.actor_num_nodes} x --actor-num-gpus-per-node "
            f"{args.actor_num_gpus_per_node}) cannot be divided by --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {pp} x --context-parallel-size {cp} = {tp * pp * cp}; change the slots or "
            "the parallel sizes"
        )
    args.data_parallel_size = args.world_size // (tp * pp * cp)
    if args.sequence_parallel and tp == 1:
        unchecked.warn(args, "--sequence-parallel has no effect with --tensor-model-parallel-size 1")
        args.sequence_parallel = False
    _check_heads(args, tp)
    _check_allgather(args, cp)


def _check_heads(args: Namespace, tp: int) -> None:
    heads = args.num_attention_heads
    if heads % tp != 0:
        raise ArgumentError(
            f"--num-attention-heads {heads} cannot be divided among --tensor-model-parallel-size {tp} ranks; use a "
            "size that divides them"
        )
    if not args.group_query_attention:
        return
    groups = args.num_query_groups
    if groups < 1 or heads % groups != 0:
        raise ArgumentError(
            f"--num-attention-heads {heads} is no multiple of --num-query-groups {groups}; correct one of them"
        )
    if groups % tp != 0 and tp % groups != 0:
        raise ArgumentError(
            f"--num-query-groups {groups} is neither a multiple nor a divisor of --tensor-model-parallel-size {tp}; "
            "use another parallel size"
        )
    if groups < tp and (args.attention_output_gate or args.use_gated_attention):
        raise ArgumentError(
            f"--num-query-groups {groups} is below --tensor-model-parallel-size {tp}, and megatron-core cannot divide "
            f"the gates of gated attention within a group; use a parallel size of at most {groups}"
        )


def _check_allgather(args: Namespace, cp: int) -> None:
    """The contiguous layout is made for sparse attention only."""
    if not args.allgather_cp or cp == 1:
        return
    path = Path(args.hf_checkpoint) / "config.json"
    if not path.is_file():
        unchecked.missing(args, f"--allgather-cp: whether the model allows it is said by {path}, which is not there")
        return
    found = json.loads(path.read_text()).get("architectures") or []
    if not set(found) & set(ALLGATHER_ARCHITECTURES):
        raise ArgumentError(
            f"--allgather-cp with --context-parallel-size {cp} is for {' and '.join(ALLGATHER_ARCHITECTURES)}, but "
            f"{path} has architectures {found}; leave it out"
        )


def check_batches(args: Namespace) -> None:
    """Every data-parallel rank needs as many micro-batches as every other one, and at least one sample."""
    ranks, size = args.data_parallel_size, args.global_batch_size
    if size is None:
        return
    group = pipeline.group_size(args)
    how = (
        f"{ranks} data-parallel ranks ({args.world_size} training slots / (tensor {args.tensor_model_parallel_size} x "
        f"pipeline {args.pipeline_model_parallel_size} x context {args.context_parallel_size}))"
    )
    if group > 1:
        how += f" x {group} micro-batches of a virtual pipeline group"
    if size < ranks * group:
        raise ArgumentError(
            f"--global-batch-size {size} leaves some of {how} without a sample; raise it or use fewer slots"
        )
    unit = ranks * group * args.micro_batch_size
    if args.use_dynamic_batch_size or unit == 1:
        return
    if plugin := _multiplier(args):
        unchecked.warn(
            args,
            f"{plugin} may return several samples for one, and a step whose samples are no multiple of "
            f"--micro-batch-size {args.micro_batch_size} x {how} ends the run; use --use-dynamic-batch-size",
        )
    if size % unit == 0 or args.custom_convert_samples_to_train_data_path:
        return
    raise ArgumentError(
        f"--global-batch-size {size} is no multiple of --micro-batch-size {args.micro_batch_size} x {how}; "
        "change one of them or use --use-dynamic-batch-size"
    )


def _multiplier(args: Namespace) -> str | None:
    """The plug-in, as it is typed, after which the number of a step's samples is not known here."""
    for name in ("custom_convert_samples_to_train_data_path", "custom_generate_function_path"):
        if getattr(args, name):
            return f"--{name.replace('_', '-')} {getattr(args, name)}"
    return None
