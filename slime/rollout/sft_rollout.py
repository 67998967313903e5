"""Supervised fine-tuning: conversations of the prompt file become samples with a loss mask; nothing is generated."""

from __future__ import annotations

import functools
import logging
from typing import Any

from slime.rollout import sglang_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.async_utils import run
from slime.utils.declared import with_defaults
from slime.utils.mask_utils import MultiTurnLossMaskGenerator, get_response_lengths
from slime.utils.moved import also_named
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

__all__ = ["generate_rollout"]

logger = logging.getLogger(__name__)


@functools.lru_cache(maxsize=4)
def mask_generator(checkpoint: str, loss_mask_type: str, trust_remote_code: bool) -> MultiTurnLossMaskGenerator:
    """Return the process's generator of masks for a checkpoint's tokenizer."""
    return MultiTurnLossMaskGenerator(load_tokenizer(checkpoint, trust_remote_code=trust_remote_code), loss_mask_type)


@also_named(data_buffer="data_source")
def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Return ``rollout_batch_size`` conversations as samples: ids, loss mask, reward 0, one sample per prompt.

    The prompt column holds chat messages; do not use ``--apply-chat-template``. Evaluations are generated as in the
    default rollout. Raises ValueError for a prompt that is no conversation or trains no token.
    """
    args = with_defaults(args)
    if evaluation:
        return run(sglang_rollout.eval_rollout(args, rollout_id))[0]
    if args.n_samples_per_prompt != 1:
        raise ValueError(f"supervised fine-tuning needs --n-samples-per-prompt 1, got {args.n_samples_per_prompt}")
    generator = mask_generator(args.hf_checkpoint, args.loss_mask_type, args.trust_remote_code)
    groups = data_source.get_samples(args.rollout_batch_size)
    for (sample,) in groups:
        _fill(sample, generator)
    if rollout_id == 0 and groups:
        first = groups[0][0]
        shown = generator.get_text_from_loss_mask(first.tokens[-first.response_length :], first.loss_mask or [])
        logger.info("the first sample trains on: %r", shown)
    return RolloutFnTrainOutput(samples=groups)


def _fill(sample: Sample, generator: MultiTurnLossMaskGenerator) -> None:
    if isinstance(sample.prompt, str):
        raise ValueError(
            f"sample index={sample.index}: supervised fine-tuning needs chat messages as prompt, got a string. Let "
            "--input-key name the column of messages and leave out --apply-chat-template."
        )
    token_ids, loss_mask = generator.get_loss_mask(sample.prompt, tools=(sample.metadata or {}).get("tools"))
    length = get_response_lengths([loss_mask])[0]
    if length == 0:
        raise ValueError(f"sample index={sample.index} trains no token: no assistant message (or all are masked)")
    sample.tokens = token_ids
    sample.response_length = length
    sample.loss_mask = loss_mask[-length:]
    sample.reward = 0
    sample.status = Sample.Status.COMPLETED
