"""What Megatron-LM fills in and checks, for the parts slime uses."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.errors import ArgumentError
from slime.arguments.rules import experts, parallelism, pipeline


def derive(args: Namespace) -> None:
    """Fill in what Megatron-LM derives. Without a trainer only the sizes are set."""
    args.rank = 0
    args.world_size = args.actor_num_nodes * args.actor_num_gpus_per_node
    _force(args)
    if args.debug_rollout_only:
        return
    _check_model(args)
    parallelism.derive_sizes(args)
    pipeline.derive_stages(args)
    parallelism.check_batches(args)
    experts.check(args)
    _derive_model(args)
    _check_recompute(args)
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


def _check_precision(args: Namespace) -> None:
    chosen = [option for option in ("--fp16", "--bf16", "--fp32") if getattr(args, option[2:])]
    if len(chosen) > 1:
        raise ArgumentError(f"{' and '.join(chosen)} exclude each other; leave one out")
