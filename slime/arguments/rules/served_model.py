"""What an engine can serve of the checkpoint: heads over its tensor-parallel ranks, and the longest sequence."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.arguments import unchecked
from slime.arguments.errors import ArgumentError
from slime.arguments.models import hf_fields
from slime.arguments.models.known import known_model
from slime.arguments.rules.hf_config import read_config


def check(args: Namespace) -> None:
    """Compare engines of ``--hf-checkpoint`` with its configuration; a deployment file may serve other models."""
    if args.debug_train_only or args.rollout_external or args.sglang_config is not None or not args.rollout_num_gpus:
        return
    config = _config(args)
    if config is None:
        return
    _check_heads(args, config)
    _warn_of_long_sequences(args, config)


def _config(args: Namespace) -> dict[str, Any] | None:
    try:
        return read_config(args.hf_checkpoint)
    except ArgumentError:  # said where the checkpoint itself is checked
        known = known_model(args.hf_checkpoint)
        return None if known is None else hf_fields.text_part(known.config)


def _check_heads(args: Namespace, config: dict[str, Any]) -> None:
    """SGLang divides heads among the ranks of an attention group, and repeats key and value heads if they are fewer."""
    ranks = args.sglang_tp_size
    if getattr(args, "sglang_enable_dp_attention", False):
        ranks //= getattr(args, "sglang_dp_size", 1)
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    where = (
        f"the {ranks} tensor-parallel ranks of an engine (--rollout-num-gpus-per-engine "
        f"{args.rollout_num_gpus_per_engine}); use another size of engine"
    )
    if isinstance(heads, int) and heads % ranks != 0:
        raise ArgumentError(f"the {heads} attention heads of {args.hf_checkpoint} cannot be divided among {where}")
    if isinstance(groups, int) and groups > 0 and groups % ranks != 0 and ranks % groups != 0:
        raise ArgumentError(
            f"the {groups} key and value heads of {args.hf_checkpoint} are neither a multiple nor a divisor of {where}"
        )


def _warn_of_long_sequences(args: Namespace, config: dict[str, Any]) -> None:
    longest = config.get("max_position_embeddings")
    scaling = config.get("rope_scaling") or {}
    if not isinstance(longest, int) or "factor" in scaling or getattr(args, "sglang_context_length", None):
        return
    for option, length in (
        ("--rollout-max-context-len", args.rollout_max_context_len),
        ("--rollout-max-response-len", args.rollout_max_response_len),
    ):
        if length is not None and length > longest:
            unchecked.warn(
                args,
                f"{option} {length} is more than the {longest} positions of {args.hf_checkpoint}, where engines end a "
                "sequence (max_position_embeddings); give --sglang-context-length if the model can do more",
            )
