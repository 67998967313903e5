"""Values that Megatron-LM fills in and checks, for the parts that slime uses."""

from __future__ import annotations

from typing import Any

from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError
from slime.arguments.passthrough.megatron import aliases
from slime.arguments.rules import experts, parallelism, sparse_attention, vision
from slime.arguments.rules.hf_config import suggested_flags
from slime.models.shape import DESCRIBED_BY, default_ffn_hidden_size, padded_vocab_size


def derive(args: Args) -> None:
    """Fill in what Megatron-LM derives. Without a trainer only the sizes are set."""
    args.rank = 0
    args.world_size = args.actor_num_nodes * args.actor_num_gpus_per_node
    fill_defaults(args)
    if args.debug_rollout_only:
        return
    _check_model(args)
    parallelism.derive_sizes(args)
    parallelism.derive_stages(args)
    sparse_attention.check(args)
    vision.check(args)
    parallelism.check_batches(args)
    experts.check(args)
    derive_model(args)
    _check_recompute(args)
    chosen = [option for option in ("--fp16", "--bf16", "--fp32") if getattr(args, option[2:])]
    if len(chosen) > 1:
        raise ArgumentError(f"{' and '.join(chosen)} exclude each other; leave one out")


def _check_model(args: Args) -> None:
    missing = [f"--{name.replace('_', '-')}" for name in DESCRIBED_BY if not getattr(args, name)]
    if args.vocab_size is None and args.padded_vocab_size is None:
        missing.append("--vocab-size")
    if missing:
        suggestion = suggested_flags(args.hf_checkpoint)
        way_out = f"; the checkpoint's values are: {suggestion}" if suggestion else ""
        raise ArgumentError(f"the model is not described: {', '.join(missing)} missing{way_out}")


def derive_model(args: Args) -> None:
    """Fill in the sizes that follow from others where they are not set. Raises ``ArgumentError``."""
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = default_ffn_hidden_size(args.hidden_size, args.swiglu)
    if args.kv_channels is None:
        if args.hidden_size % args.num_attention_heads != 0:
            raise ArgumentError(
                f"--hidden-size {args.hidden_size} is no multiple of --num-attention-heads {args.num_attention_heads}; "
                "give --kv-channels, the size of a head"
            )
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.make_vocab_size_divisible_by < 1:
        raise ArgumentError(
            f"--make-vocab-size-divisible-by {args.make_vocab_size_divisible_by}: expected a number of at least 1"
        )
    if args.padded_vocab_size is None:
        args.padded_vocab_size = padded_vocab_size(args)
    elif args.vocab_size is not None and args.padded_vocab_size < args.vocab_size:
        raise ArgumentError(f"--padded-vocab-size {args.padded_vocab_size} is below --vocab-size {args.vocab_size}")
    elif args.padded_vocab_size % args.tensor_model_parallel_size != 0:
        raise ArgumentError(
            f"--padded-vocab-size {args.padded_vocab_size} is no multiple of "
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size}"
        )


def set_field_names(args: Args) -> None:
    """Set the attributes that megatron-core's configuration classes read under another name than that of the flag."""
    for dest, field in aliases().items():
        if hasattr(args, dest):  # a tool's own parser may lack some
            setattr(args, field, getattr(args, dest))


def _check_recompute(args: Args) -> None:
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
    if args.recompute_granularity == "selective" and args.recompute_num_layers is not None:
        raise ArgumentError(
            f"--recompute-num-layers {args.recompute_num_layers} needs --recompute-granularity full: selective "
            "recomputation concerns parts of every layer; leave one out"
        )


def fill_defaults(args: Args) -> None:
    """Set them in place. Attributes that are missing count as not given: tools bring their own namespaces."""
    args.use_distributed_optimizer = True
    args.use_persistent_ckpt_worker = args.ckpt_assume_constant_structure = args.ckpt_fully_parallel_load = True
    args.dist_ckpt_save_pre_mcore_014 = True
    args.enable_gloo_process_groups = getattr(args, "enable_gloo_process_groups", True)
    if _value(args, "tokenizer_type") is None and _value(args, "tokenizer_model") is None:
        args.tokenizer_type, args.tokenizer_model = "HuggingFaceTokenizer", _value(args, "hf_checkpoint")
    if _value(args, "moe_token_dispatcher_type") == "allgather":
        args.moe_token_dispatcher_type = "alltoall"  # the other one cannot take sequences of different lengths
    if _value(args, "use_rotary_position_embeddings"):
        args.position_embedding_type = "rope"
    args.attention_output_gate = bool(_value(args, "attention_output_gate") or _value(args, "use_gated_attention"))
    args.seq_length = _value(args, "seq_length") or 4096
    args.max_position_embeddings = _value(args, "max_position_embeddings") or args.seq_length
    if _value(args, "rope_type") is None:
        args.rope_type = "yarn" if _value(args, "multi_latent_attention") else "rope"


def _value(args: Args, name: str) -> Any:
    return getattr(args, name, None)
