"""The longest sequence that an engine takes: a request for more is refused, and would end the run."""

from __future__ import annotations

from functools import cache
from typing import Any

from slime.arguments.errors import ArgumentError
from slime.arguments.models import hf_fields
from slime.arguments.rules.hf_config import read_config


def engine_context_len(args: Any) -> int | None:
    """Return the tokens of prompt and response that the run's engines take together; None when it is not known.

    Engines that were started by others, or by a deployment file, may take another number than the checkpoint says.
    """
    if args.debug_train_only:
        return None
    given = args.sglang_context_length
    if given is not None:
        return int(given)
    if args.rollout_external or args.sglang_config is not None:
        return None
    return _positions(str(args.hf_checkpoint))


def longest_prompt(args: Any) -> int | None:
    """Return the tokens of the longest prompt that leaves room for one to generate; None when it is not known."""
    context = engine_context_len(args)
    return None if context is None else context - 1


@cache
def _positions(hf_checkpoint: str) -> int | None:
    try:
        config = read_config(hf_checkpoint)
    except ArgumentError:
        return None  # whoever needs the checkpoint says so
    longest = config.get("max_position_embeddings")
    stretched = hf_fields.rope_scaling(config) is not None
    return longest if isinstance(longest, int) and not stretched else None
