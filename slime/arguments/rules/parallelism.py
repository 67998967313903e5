"""Parallel sizes, pipeline stages, and batches: what must divide what."""

from __future__ import annotations

import json
from pathlib import Path

from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.command_line import flags_where
from slime.arguments.errors import ArgumentError

ALLGATHER_ARCHITECTURES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")


def derive_sizes(args: Args) -> None:
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
        diagnostics.warn(args, "--sequence-parallel has no effect with --tensor-model-parallel-size 1")
        args.sequence_parallel = False
    _check_heads(args, tp)
    _check_allgather(args, cp)


def _check_heads(args: Args, tp: int) -> None:
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


def _check_allgather(args: Args, cp: int) -> None:
    """The contiguous layout is made for sparse attention only."""
    if not args.allgather_cp or cp == 1:
        return
    path = Path(args.hf_checkpoint) / "config.json"
    if not path.is_file():
        diagnostics.unavailable(
            args, f"--allgather-cp: whether the model allows it is said by {path}, which is not there"
        )
        return
    found = json.loads(path.read_text()).get("architectures") or []
    if not set(found) & set(ALLGATHER_ARCHITECTURES):
        raise ArgumentError(
            f"--allgather-cp with --context-parallel-size {cp} is for {' and '.join(ALLGATHER_ARCHITECTURES)}, but "
            f"{path} has architectures {found}; leave it out"
        )


def check_batches(args: Args) -> None:
    """Every data-parallel rank needs as many micro-batches as every other one, and at least one sample."""
    ranks, size = args.data_parallel_size, args.global_batch_size
    if size is None:
        return
    group = micro_batch_group_size(args)
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
    plugins = ("custom_convert_samples_to_train_data_path", "custom_generate_function_path")
    if plugin := next((name for name in plugins if getattr(args, name)), None):
        diagnostics.warn(
            args,
            f"--{plugin.replace('_', '-')} {getattr(args, plugin)} may return several samples for one, and a "
            f"step whose samples are no multiple of --micro-batch-size {args.micro_batch_size} x {how} ends the run; "
            "use --use-dynamic-batch-size",
        )
    if size % unit == 0 or args.custom_convert_samples_to_train_data_path:
        return
    raise ArgumentError(
        f"--global-batch-size {size} is no multiple of --micro-batch-size {args.micro_batch_size} x {how}; "
        "change one of them or use --use-dynamic-batch-size"
    )


_ENDS = {
    "decoder_first_pipeline_num_layers": "--decoder-first-pipeline-num-layers",
    "decoder_last_pipeline_num_layers": "--decoder-last-pipeline-num-layers",
}


def derive_stages(args: Args) -> None:
    """Check that layers divide over stages; set ``virtual_pipeline_model_parallel_size`` and how stages talk."""
    _check_ends(args)
    stages = _virtual_stages(args)
    if stages is not None:
        args.virtual_pipeline_model_parallel_size = stages if stages > 1 else None
    if args.pipeline_model_parallel_layout is None:
        _check_stage_layers(args, args.virtual_pipeline_model_parallel_size or 1)
    if args.virtual_pipeline_model_parallel_size is not None:
        _check_interleaving(args)
    else:
        args.overlap_p2p_comm = False  # only the interleaved schedule overlaps
    args.batch_p2p_comm = not args.overlap_p2p_comm


def micro_batch_group_size(args: Args) -> int:
    """Micro-batches that a data-parallel rank must have a multiple of."""
    if args.virtual_pipeline_model_parallel_size is None:
        return 1
    return int(args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size)


def _check_ends(args: Args) -> None:
    given = [option for name, option in _ENDS.items() if getattr(args, name) is not None]
    if not given:
        return
    if args.pipeline_model_parallel_size == 1:
        raise ArgumentError(
            f"{' and '.join(given)} {'need' if len(given) == 2 else 'needs'} --pipeline-model-parallel-size above 1; "
            f"leave {'them' if len(given) == 2 else 'it'} out"
        )
    for name, option in _ENDS.items():
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ArgumentError(f"{option} {getattr(args, name)}: a pipeline stage has at least 1 layer")
    for flag in flags_where(lambda traits: traits.divides_layers):
        if getattr(args, flag.dest) not in (None, False):
            raise ArgumentError(f"{given[0]} and {flag.option} both say how layers are divided; leave one of them out")


def _virtual_stages(args: Args) -> int | None:
    per_stage, stages = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    layers, pp = args.num_layers, args.pipeline_model_parallel_size
    if per_stage is None:
        return stages if stages is None else int(stages)
    if stages is not None:
        raise ArgumentError(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank say the same; "
            "leave one out"
        )
    uneven = [option for name, option in _ENDS.items() if getattr(args, name) is not None]
    if uneven:
        raise ArgumentError(
            f"--num-layers-per-virtual-pipeline-stage {per_stage} needs stages of equal size, which {uneven[0]} makes "
            "unequal; give --num-virtual-stages-per-pipeline-rank instead"
        )
    if per_stage < 1 or layers // pp % per_stage != 0:
        raise ArgumentError(
            f"{layers // pp} layers per pipeline stage are no multiple of "
            f"--num-layers-per-virtual-pipeline-stage {per_stage}; use a number that divides them"
        )
    return int(layers // pp // per_stage)


def _check_stage_layers(args: Args, virtual: int) -> None:
    """Every stage, and every virtual stage of it, must get a whole number of layers."""
    layers, pp = args.num_layers, args.pipeline_model_parallel_size
    if pp == 1:
        return
    ends = {option: size for name, option in _ENDS.items() if (size := getattr(args, name)) is not None}
    for option, size in ends.items():
        if size % virtual != 0:
            raise ArgumentError(f"{option} {size} cannot be divided among {virtual} virtual stages; change one of them")
    # Embedding and loss may count as a layer each.
    counted = layers + args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    left, stages = counted - sum(ends.values()), pp - len(ends)
    if (left > 0) != (stages > 0) or left < 0:
        raise ArgumentError(
            f"--num-layers {layers}: {_ends_leave(ends)} {left} layers for the other {stages} of "
            f"--pipeline-model-parallel-size {pp} stages; change one of them"
        )
    if stages and left % (stages * virtual) != 0:
        raise ArgumentError(_indivisible(args, ends, left, stages, virtual))


def _ends_leave(ends: dict[str, int]) -> str:
    given = " and ".join(f"{option} {layers}" for option, layers in ends.items())
    return f"{given} {'leaves' if len(ends) == 1 else 'leave'}"


def _indivisible(args: Args, ends: dict[str, int], left: int, stages: int, virtual: int) -> str:
    pp = args.pipeline_model_parallel_size
    if left % stages == 0:
        return (
            f"{left // stages} layers per pipeline stage cannot be divided among {virtual} virtual stages "
            "(--num-virtual-stages-per-pipeline-rank); change one of them"
        )
    if ends:
        return (
            f"--num-layers {args.num_layers}: {_ends_leave(ends)} {left} layers, which cannot be divided among the "
            f"other {stages} of --pipeline-model-parallel-size {pp} stages; change one of them"
        )
    return (
        f"--num-layers {args.num_layers} cannot be divided among --pipeline-model-parallel-size {pp} stages; "
        "give --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
    )


def _check_interleaving(args: Args) -> None:
    pp, group = args.pipeline_model_parallel_size, args.microbatch_group_size_per_vp_stage
    if pp == 1:
        raise ArgumentError(
            "virtual pipeline stages (--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank) "
            "need --pipeline-model-parallel-size above 1; leave them out"
        )
    if pp == 2 and not args.overlap_p2p_comm:
        raise ArgumentError(
            "virtual pipeline stages on --pipeline-model-parallel-size 2 need overlapped communication; leave "
            "--no-overlap-p2p-communication out"
        )
    if group is not None and group < pp:
        raise ArgumentError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is below --pipeline-model-parallel-size {pp}; "
            "raise it or leave it out"
        )


def derive_global_batch_size(args: Args) -> None:
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
            given = "" if "rollout_batch_size" in diagnostics.missing_flags(args) else f"{made}; "
            diagnostics.missing_flag(
                args,
                "global_batch_size",
                f"the batch size is missing: {given}give --global-batch-size, or --num-steps-per-rollout to split them",
                stand_in=samples,
            )
        if samples < args.global_batch_size and not _batch_size_set_by_plugin(args):
            raise ArgumentError(
                f"{made}, fewer than --global-batch-size {args.global_batch_size}: no optimizer step could be made; "
                "lower it or generate more"
            )
        if not _batch_size_set_by_plugin(args) and not args.debug_rollout_only and args.load_debug_rollout_data is None:
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


def _warn_of_left_over(args: Args, made: str, samples: int) -> None:
    size = args.global_batch_size
    left, rollouts = samples % size, args.num_rollout
    if not left or rollouts == 0:
        return
    at_the_end = (rollouts - (args.start_rollout_id or 0)) * samples % size if rollouts else None
    lost = f", and the last {at_the_end} of the run train no step" if at_the_end else ""
    nearest = min((d for d in range(1, samples + 1) if samples % d == 0), key=lambda divisor: abs(divisor - size))
    diagnostics.warn(
        args,
        f"{made}, no multiple of --global-batch-size {size}: {left} of the first rollout wait and are trained on after "
        f"the next one, when the weights are no longer those that made them{lost}; a rollout is divided evenly by "
        f"--global-batch-size {nearest}, or by --num-steps-per-rollout",
    )


def _batch_size_set_by_plugin(args: Args) -> bool:
    """Return True if a plug-in decides the number of rollouts. A generate function does not: what it makes of one
    prompt copy counts as one."""
    own_loop = not args.rollout_function_path.startswith("slime.")
    return own_loop or args.custom_convert_samples_to_train_data_path is not None


def check_micro_batches(args: Args) -> None:
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
        diagnostics.warn(
            args,
            f"--log-probs-max-tokens-per-gpu {args.log_probs_max_tokens_per_gpu} has no effect: the log-prob pass uses "
            f"the micro-batches of training (--max-tokens-per-gpu {args.max_tokens_per_gpu}); leave it out",
        )
    if args.log_probs_chunk_size != -1 and args.log_probs_chunk_size <= 0:
        raise ArgumentError(
            f"--log-probs-chunk-size {args.log_probs_chunk_size}: give the largest number of tokens per chunk, or -1"
        )
    _warn_of_long_samples(args)


def _warn_of_long_samples(args: Args) -> None:
    if not args.use_dynamic_batch_size or args.debug_rollout_only or not args.rollout_max_response_len:
        return
    if args.max_tokens_per_gpu is None:
        return
    cp = max(1, args.context_parallel_size)
    limit = args.max_tokens_per_gpu * cp
    if args.rollout_max_response_len >= limit:
        diagnostics.warn(
            args,
            f"--rollout-max-response-len {args.rollout_max_response_len} and its prompt are more than "
            f"--max-tokens-per-gpu {args.max_tokens_per_gpu} x --context-parallel-size {cp} = {limit} tokens: such a "
            "sample makes a micro-batch of its own, above that limit",
        )
