"""Supervised fine-tuning: conversations of the prompt file become samples with a loss mask; nothing is generated."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from slime.arguments.args import Args
from slime.rollout import sglang_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.requests.images import images_of, set_train_inputs
from slime.utils.async_utils import run
from slime.utils.chat_messages import check_messages
from slime.utils.declared import with_defaults
from slime.utils.image_tokens import image_lengths, placeholder_id, with_lengths
from slime.utils.mask_utils import MultiTurnLossMaskGenerator, get_response_lengths
from slime.utils.moved import also_named
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.prompt_files import read_rows
from slime.utils.types import Sample

if TYPE_CHECKING:
    from slime.rollout.data_source import DataSource

__all__ = ["generate_rollout"]

logger = logging.getLogger(__name__)


@functools.lru_cache(maxsize=4)
def reader_of(checkpoint: str, backend: str, trust_remote_code: bool) -> SimpleNamespace:
    """Return tokenizer and processor of a checkpoint. Raises ValueError for one without a processor."""
    processor = load_processor(checkpoint, backend=backend, trust_remote_code=trust_remote_code)
    if processor is None:
        raise ValueError(f"{checkpoint} has no processor for the images of conversations")
    return SimpleNamespace(
        tokenizer=load_tokenizer(checkpoint, trust_remote_code=trust_remote_code), processor=processor
    )


@functools.lru_cache(maxsize=4)
def mask_generator(checkpoint: str, loss_mask_type: str, trust_remote_code: bool) -> MultiTurnLossMaskGenerator:
    """Return the process's generator of masks for a checkpoint's tokenizer."""
    return MultiTurnLossMaskGenerator(load_tokenizer(checkpoint, trust_remote_code=trust_remote_code), loss_mask_type)


@also_named(data_buffer="data_source")
def generate_rollout(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Return ``rollout_batch_size`` conversations as samples: ids, loss mask, reward 0, one sample per prompt.

    The prompt column holds chat messages; do not use ``--apply-chat-template``. Conversations of more tokens than
    ``rollout_max_context_len``, or than ``rollout_max_prompt_len`` before the first trained one, are dropped and others
    drawn in their place. Evaluations are generated as in the default rollout. Raises ValueError for a prompt that is no
    conversation or trains no token.
    """
    args = with_defaults(args)
    if evaluation:
        return run(sglang_rollout.eval_rollout(args, rollout_id))[0]
    if args.n_samples_per_prompt != 1:
        raise ValueError(f"supervised fine-tuning needs --n-samples-per-prompt 1, got {args.n_samples_per_prompt}")
    generator = mask_generator(args.hf_checkpoint, args.loss_mask_type, args.trust_remote_code)
    groups: list[list[Sample]] = []
    dropped = 0
    while len(groups) < args.rollout_batch_size:
        drawn = data_source.get_samples(args.rollout_batch_size - len(groups))
        if not drawn and not groups:
            raise RuntimeError(f"rollout {rollout_id}: the data source has no more conversations")
        if not drawn:
            break
        for group in drawn:
            _fill(args, group[0], generator)
            if _is_too_long(args, group[0]):
                dropped += 1
            else:
                groups.append(group)
        if not groups and dropped >= len(data_source):
            raise ValueError(
                f"--prompt-data {args.prompt_data} holds no conversation within --rollout-max-context-len "
                f"{args.rollout_max_context_len} and --rollout-max-prompt-len {args.rollout_max_prompt_len}"
            )
    samples = [group[0] for group in groups]
    if rollout_id == 0:
        first = samples[0]
        shown = generator.get_text_from_loss_mask(first.tokens[-first.response_length :], first.loss_mask or [])
        logger.info("the first sample trains on: %r", shown)
    above = sum(len(sample.tokens) > most for sample in samples) if (most := _micro_batch_tokens(args)) else 0
    if dropped or above:
        logger.warning(
            "rollout %d: %d conversations were dropped as longer than --rollout-max-context-len or "
            "--rollout-max-prompt-len; %d are longer than --max-tokens-per-gpu and get a micro-batch of their own",
            rollout_id, dropped, above,
        )  # fmt: skip
    metrics = {"rollout/sft/dropped": dropped, "rollout/sft/above_max_tokens_per_gpu": above}
    return RolloutFnTrainOutput(samples=groups, metrics=metrics)


def _is_too_long(args: Args, sample: Sample) -> bool:
    """True if a conversation, or the part of it before the first trained token, exceeds the limit of its flag."""
    limits = (
        (args.rollout_max_context_len, len(sample.tokens)),
        (args.rollout_max_prompt_len, len(sample.tokens) - sample.response_length),
    )
    return any(limit is not None and length > limit for limit, length in limits)


def _micro_batch_tokens(args: Args) -> int | None:
    if not args.use_dynamic_batch_size or args.max_tokens_per_gpu is None:
        return None
    return int(args.max_tokens_per_gpu * args.context_parallel_size)


def _fill(args: Args, sample: Sample, generator: MultiTurnLossMaskGenerator) -> None:
    prompt: Any = sample.prompt
    if isinstance(prompt, str):
        raise ValueError(
            f"{_place(args, sample)}: supervised fine-tuning needs chat messages as prompt, got a string. Let "
            "--input-key name the column of messages and leave out --apply-chat-template."
        )
    try:
        check_messages(prompt, f"column {args.input_key!r}")
        images, tools = images_of(sample), (sample.metadata or {}).get("tools")
        token_ids, loss_mask = generator.get_loss_mask(prompt, tools=tools, with_images=bool(images))
        if images:
            reader = reader_of(args.hf_checkpoint, args.sglang_image_processor_backend, args.trust_remote_code)
            lengths, inputs = image_lengths(reader, sample.multimodal_inputs or {})
            pad = placeholder_id(reader)
            token_ids, loss_mask = with_lengths(token_ids, pad, lengths, loss_mask, "the conversation")
            set_train_inputs(sample, inputs)
    except Exception as e:
        raise ValueError(f"{_place(args, sample)}: no loss mask can be made: {type(e).__name__}: {e}") from e
    length = get_response_lengths([loss_mask])[0]
    if length == 0:
        raise ValueError(f"{_place(args, sample)} trains no token: no assistant message (or all are masked)")
    sample.tokens = token_ids
    sample.response_length = length
    sample.loss_mask = loss_mask[-length:]
    sample.reward = 0
    sample.status = Sample.Status.COMPLETED


def _place(args: Args, sample: Sample) -> str:
    """Name the row of a conversation that cannot be used, which is looked for then: samples know none."""
    rows = read_rows(args.prompt_data) if args.prompt_data else ()
    found = next((where for where, row in rows if row.get(args.input_key) == sample.prompt), None)
    return f"sample index={sample.index}" if found is None else f"{found} (sample index={sample.index})"
