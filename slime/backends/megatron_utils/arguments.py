"""Defaults for tools that parse Megatron's flags themselves; ``slime.arguments.parse_args`` sets the same."""

from __future__ import annotations

from slime.arguments.args import Args
from slime.arguments.rules import megatron
from slime.models.shape import padded_vocab_size

__all__ = ["set_default_megatron_args"]


def set_default_megatron_args(args: Args) -> Args:
    """Fill ``args`` in place with what slime always gives Megatron, and return it.

    Works on any namespace: bf16 unless ``fp16``, 4096 positions, the distributed optimizer, the tokenizer of
    ``hf_checkpoint``, checkpoints that any layout can read, and ``padded_vocab_size`` where ``vocab_size`` is known.
    """
    megatron.fill_defaults(args)
    args.bf16 = not getattr(args, "fp16", False)
    if getattr(args, "vocab_size", None) and not getattr(args, "padded_vocab_size", None):
        args.padded_vocab_size = padded_vocab_size(args)
    return args
