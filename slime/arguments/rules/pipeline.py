"""Layers over pipeline stages, virtual stages, and the micro-batches that keep them busy."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.errors import ArgumentError

_ENDS = {
    "decoder_first_pipeline_num_layers": "--decoder-first-pipeline-num-layers",
    "decoder_last_pipeline_num_layers": "--decoder-last-pipeline-num-layers",
}


def derive_stages(args: Namespace) -> None:
    """Check that layers divide over stages; set ``virtual_pipeline_model_parallel_size`` and how stages talk."""
    _check_ends(args)
    stages = _virtual_stages(args)
    if stages is not None:
        args.virtual_pipeline_model_parallel_size = stages if stages > 1 else None
    if args.pipeline_model_parallel_layout is None:
        _check_layers(args, args.virtual_pipeline_model_parallel_size or 1)
    if args.virtual_pipeline_model_parallel_size is not None:
        _check_interleaving(args)
    else:
        args.overlap_p2p_comm = False  # only the interleaved schedule overlaps
    args.batch_p2p_comm = not args.overlap_p2p_comm


def group_size(args: Namespace) -> int:
    """Micro-batches that a data-parallel rank must have a multiple of."""
    if args.virtual_pipeline_model_parallel_size is None:
        return 1
    return int(args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size)


def _check_ends(args: Namespace) -> None:
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
    others = {
        "--pipeline-model-parallel-layout": args.pipeline_model_parallel_layout is not None,
        "--account-for-embedding-in-pipeline-split": args.account_for_embedding_in_pipeline_split,
        "--account-for-loss-in-pipeline-split": args.account_for_loss_in_pipeline_split,
    }
    for option, present in others.items():
        if present:
            raise ArgumentError(f"{given[0]} and {option} both say how layers are divided; leave one of them out")


def _virtual_stages(args: Namespace) -> int | None:
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


def _check_layers(args: Namespace, virtual: int) -> None:
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
            f"--num-layers {layers}: {_words(ends)} {left} layers for the other {stages} of "
            f"--pipeline-model-parallel-size {pp} stages; change one of them"
        )
    if stages and left % (stages * virtual) != 0:
        raise ArgumentError(_indivisible(args, ends, left, stages, virtual))


def _words(ends: dict[str, int]) -> str:
    given = " and ".join(f"{option} {layers}" for option, layers in ends.items())
    return f"{given} {'leaves' if len(ends) == 1 else 'leave'}"


def _indivisible(args: Namespace, ends: dict[str, int], left: int, stages: int, virtual: int) -> str:
    pp = args.pipeline_model_parallel_size
    if left % stages == 0:
        return (
            f"{left // stages} layers per pipeline stage cannot be divided among {virtual} virtual stages "
            "(--num-virtual-stages-per-pipeline-rank); change one of them"
        )
    if ends:
        return (
            f"--num-layers {args.num_layers}: {_words(ends)} {left} layers, which cannot be divided among the other "
            f"{stages} of --pipeline-model-parallel-size {pp} stages; change one of them"
        )
    return (
        f"--num-layers {args.num_layers} cannot be divided among --pipeline-model-parallel-size {pp} stages; "
        "give --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
    )


def _check_interleaving(args: Namespace) -> None:
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
