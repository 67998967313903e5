"""Values that slime always gives Megatron, or that Megatron-LM's scripts would fill in."""

from __future__ import annotations

from argparse import Namespace
from typing import Any


def fill(args: Namespace) -> None:
    """Set them in place. Attributes that are missing count as not given: tools bring namespaces of their own."""
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


def _value(args: Namespace, name: str) -> Any:
    return getattr(args, name, None)
