"""What Megatron-LM fills in and checks, for the parts slime uses."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.errors import ArgumentError


def derive(args: Namespace) -> None:
    """Fill in what Megatron-LM derives. Without a trainer only the sizes are set."""
    args.rank = 0
    args.world_size = args.actor_num_nodes * args.actor_num_gpus_per_node
    _force(args)
    if args.debug_rollout_only:
        return
    _check_model(args)
    _derive_parallel_sizes(args)
    _derive_virtual_stages(args)
    _derive_model(args)
    _check_recompute(args)
    _check_optimizer(args)
    _check_precision(args)


def _force(args: Namespace) -> None:
    args.use_distributed_optimizer = True
    args.use_persistent_ckpt_worker = args.ckpt_assume_constant_structure = args.ckpt_fully_parallel_load = True
    args.dist_ckpt_save_pre_mcore_014 = True
    args.enable_gloo_process_groups = True
    args.tokenizer_type, args.tokenizer_model = "HuggingFaceTokenizer", args.hf_checkpoint
    if args.moe_token_dispatcher_type == "allgather":
        args.moe_token_dispatcher_type = "alltoall"
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    args.seq_length = args.seq_length or 4096
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    if args.rope_type is None:
        args.rope_type = "yarn" if args.multi_latent_attention else "rope"


def _check_model(args: Namespace) -> None:
    from slime.arguments.rules.hf_config import suggested_flags

    needed = {
        "num_layers": "--num-layers",
        "hidden_size": "--hidden-size",
        "num_attention_heads": "--num-attention-heads",
    }
    missing = [option for name, option in needed.items() if not getattr(args, name)]
    if missing:
        suggestion = suggested_flags(args.hf_checkpoint)
        way_out = f"; the checkpoint's values are: {suggestion}" if suggestion else ""
        raise ArgumentError(f"the model is not described: {', '.join(missing)} missing{way_out}")
    if args.vocab_size is None and args.padded_vocab_size is None:
        raise ArgumentError("--vocab-size is missing (or --padded-vocab-size): the vocabulary of the checkpoint")


def _derive_parallel_sizes(args: Namespace) -> None:
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    if min(tp, pp, cp) < 1:
        raise ArgumentError(
            "--tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size: at least 1"
        )
    if args.world_size % (tp * pp * cp) != 0:
        raise ArgumentError(
            f"{args.world_size} training slots (--actor-num-nodes {args.actor_num_nodes} x --actor-num-gpus-per-node "
            f"{args.actor_num_gpus_per_node}) cannot be divided by tensor {tp} x pipeline {pp} x context {cp} = "
            f"{tp * pp * cp} parallel slots; change the slots or the parallel sizes"
        )
    args.data_parallel_size = args.world_size // (tp * pp * cp)
    if args.sequence_parallel and tp == 1:
        args.sequence_parallel = False
    for count, what in (
        (args.num_attention_heads, "--num-attention-heads"),
        (_query_groups(args), "--num-query-groups"),
    ):
        if count % tp != 0 and tp % count != 0:
            raise ArgumentError(f"{what} {count} cannot be divided among --tensor-model-parallel-size {tp} ranks")
    if args.num_attention_heads % tp != 0:
        raise ArgumentError(
            f"--num-attention-heads {args.num_attention_heads} is no multiple of --tensor-model-parallel-size {tp}"
        )
    _check_batch_division(args)


def _check_batch_division(args: Namespace) -> None:
    ranks, size = args.data_parallel_size, args.global_batch_size
    if size is None:
        return
    how = (
        f"{ranks} data-parallel ranks ({args.world_size} training slots / (tensor {args.tensor_model_parallel_size} x "
        f"pipeline {args.pipeline_model_parallel_size} x context {args.context_parallel_size}))"
    )
    if size < ranks:
        raise ArgumentError(
            f"--global-batch-size {size} leaves some of {how} without a sample; raise it or use fewer slots"
        )
    if not args.use_dynamic_batch_size and size % (ranks * args.micro_batch_size) != 0:
        raise ArgumentError(
            f"--global-batch-size {size} is no multiple of --micro-batch-size {args.micro_batch_size} x {how}; "
            "change one of them or use --use-dynamic-batch-size"
        )


def _query_groups(args: Namespace) -> int:
    return int(args.num_query_groups if args.group_query_attention else args.num_attention_heads)


def _derive_virtual_stages(args: Namespace) -> None:
    layers, pp = args.num_layers, args.pipeline_model_parallel_size
    ends = (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers)
    if pp == 1 and any(end is not None for end in ends):
        raise ArgumentError(
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers need "
            "--pipeline-model-parallel-size above 1; leave them out"
        )
    # Embedding and loss may count as a layer each.
    counted = layers + args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    if pp > 1 and ends == (None, None) and args.pipeline_model_parallel_layout is None and counted % pp != 0:
        raise ArgumentError(
            f"--num-layers {layers} cannot be divided among --pipeline-model-parallel-size {pp} stages; "
            "give --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
        )
    per_stage, stages = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    if per_stage is not None and stages is not None:
        raise ArgumentError(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank say the same; "
            "leave one out"
        )
    if per_stage is not None:
        if layers // pp % per_stage != 0:
            raise ArgumentError(
                f"{layers // pp} layers per pipeline stage are no multiple of "
                f"--num-layers-per-virtual-pipeline-stage {per_stage}"
            )
        stages = layers // pp // per_stage
    if stages is not None:
        args.virtual_pipeline_model_parallel_size = stages if stages > 1 else None
    if args.virtual_pipeline_model_parallel_size is None:
        args.overlap_p2p_comm = False  # only the interleaved schedule overlaps
    args.batch_p2p_comm = not args.overlap_p2p_comm


def _derive_model(args: Namespace) -> None:
    if args.ffn_hidden_size is None:
        # Megatron-LM's defaults: 4h, and 2/3 of it in multiples of 64 with a gate
        hidden = args.hidden_size
        args.ffn_hidden_size = int((4 * hidden * 2 / 3) / 64) * 64 if args.swiglu else 4 * hidden
    if args.kv_channels is None:
        if args.hidden_size % args.num_attention_heads != 0:
            raise ArgumentError(
                f"--hidden-size {args.hidden_size} is no multiple of --num-attention-heads {args.num_attention_heads}; "
                "give --kv-channels, the size of a head"
            )
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.padded_vocab_size is None:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    elif args.vocab_size is not None and args.padded_vocab_size < args.vocab_size:
        raise ArgumentError(f"--padded-vocab-size {args.padded_vocab_size} is below --vocab-size {args.vocab_size}")
    elif args.padded_vocab_size % args.tensor_model_parallel_size != 0:
        raise ArgumentError(
            f"--padded-vocab-size {args.padded_vocab_size} is no multiple of "
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size}"
        )


def _check_recompute(args: Namespace) -> None:
    if args.recompute_activations:
        if args.recompute_granularity == "full":
            raise ArgumentError(
                "--recompute-activations means --recompute-granularity selective, not full; leave one out"
            )
        args.recompute_granularity = "selective"
    if args.recompute_granularity == "full" and args.recompute_method is None:
        raise ArgumentError("--recompute-granularity full needs --recompute-method uniform or block")
    if args.recompute_granularity == "full" and args.recompute_num_layers is None:
        raise ArgumentError(
            "--recompute-granularity full needs --recompute-num-layers, the layers per recomputed block"
        )
    if args.recompute_granularity != "full" and args.recompute_method is not None:
        raise ArgumentError(f"--recompute-method {args.recompute_method} needs --recompute-granularity full")


def _check_optimizer(args: Namespace) -> None:
    if args.min_lr > args.lr:
        raise ArgumentError(f"--min-lr {args.min_lr} is above --lr {args.lr}")
    if args.lr_warmup_fraction is not None and args.lr_warmup_iters != 0:
        raise ArgumentError("--lr-warmup-fraction and --lr-warmup-iters exclude each other; leave one out")
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        raise ArgumentError("--lr-decay-style WSD needs --lr-wsd-decay-iters")
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise ArgumentError(
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other; leave one out"
        )
    if args.start_weight_decay is None:
        args.start_weight_decay = args.weight_decay
    if args.end_weight_decay is None:
        args.end_weight_decay = args.weight_decay


def _check_precision(args: Namespace) -> None:
    chosen = [option for option in ("--fp16", "--bf16", "--fp32") if getattr(args, option[2:])]
    if len(chosen) > 1:
        raise ArgumentError(f"{' and '.join(chosen)} exclude each other; leave one out")
