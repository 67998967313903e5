"""Prompts, batches and how they are cut into micro-batches."""

from __future__ import annotations

from typing import Any

from slime.arguments.group import ArgumentGroup, flag
from slime.arguments.types import DottedPath


class Data(ArgumentGroup):
    """Prompt data."""

    title = "data"

    num_rollout: int | None = flag(None, "rollouts of the whole run; 0 with --eval-interval evaluates once", ge=0)
    num_epoch: int | None = flag(
        None,
        "passes over the prompts; with --num-rollout, which then says how long the run is, only the epoch ends",
        ge=1,
    )
    rollout_global_dataset: bool = flag(
        True,
        "no built-in data set: the rollout function finds its own prompts",
        option="--disable-rollout-global-dataset",
    )
    data_source_path: DottedPath = flag(
        "slime.rollout.data_source.RolloutDataSourceWithBuffer", "dotted path of the data-source class"
    )
    prompt_data: str | None = flag(None, "prompts, .jsonl or .parquet; path@[a:b] takes rows a to b")
    apply_chat_template: bool = flag(False, "run messages through the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, Any] = flag({}, "JSON object of extra arguments of the chat template")
    input_key: str = flag("input", "column of the prompt")
    label_key: str | None = flag(None, "column of the label")
    multimodal_keys: dict[str, str] | None = flag(None, 'JSON object of media type -> column, e.g. {"image": "images"}')
    metadata_key: str = flag("metadata", "column of the metadata object")
    tool_key: str = flag("tools", "column of the tool list")
    start_rollout_id: int | None = flag(None, "first rollout id; default: the checkpoint's, else 0", ge=0)


class Batch(ArgumentGroup):
    """Batch sizes and micro-batches."""

    title = "batches"

    rollout_batch_size: int = flag(None, "prompts per rollout", required=True, ge=1)
    n_samples_per_prompt: int = flag(1, "responses per prompt (the group size)", ge=1)
    global_batch_size: int | None = flag(None, "samples per optimiser step", ge=1)
    num_steps_per_rollout: int | None = flag(
        None, "optimiser steps per rollout; the other way to give the batch size", ge=1
    )
    micro_batch_size: int = flag(1, "samples per micro-batch; without effect with --use-dynamic-batch-size", ge=1)
    balance_data: bool = flag(False, "balance the work of data-parallel ranks by estimated FLOPs")
    balance_by_flops: bool = flag(False, "form micro-batches by FLOPs too (the token limit may be exceeded)")
    use_dynamic_batch_size: bool = flag(False, "pack micro-batches by tokens, up to --max-tokens-per-gpu")
    max_tokens_per_gpu: int | None = flag(
        None, "tokens of one micro-batch per slot (times context-parallel size)", ge=1
    )
    log_probs_max_tokens_per_gpu: int | None = flag(
        None, "the log-prob pass uses the micro-batches of training: nothing else than --max-tokens-per-gpu", ge=1
    )
