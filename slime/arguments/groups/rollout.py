"""Generation of rollouts."""

from __future__ import annotations

from typing import Literal

from slime.arguments.group import ArgumentGroup, flag
from slime.arguments.types import DottedPath


class Rollout(ArgumentGroup):
    """Generation: sampling, groups, filters, custom functions."""

    title = "rollout generation"

    hf_checkpoint: str = flag(
        None,
        "Hugging Face checkpoint directory: tokenizer, engine weights, names of exported weights",
        required=True,
    )
    model_name: str | None = flag(None, "model family for weight names; default: from the checkpoint's config.json")
    rollout_function_path: DottedPath = flag(
        "slime.rollout.sglang_rollout.generate_rollout", "dotted path of the function that produces one rollout"
    )
    rollout_temperature: float = flag(1.0, "sampling temperature; the trainer divides its logits by it too", gt=0)
    rollout_top_p: float = flag(1.0, "nucleus sampling", gt=0, le=1)
    rollout_top_k: int = flag(-1, "sample among the k likeliest tokens; -1: all")
    rollout_max_context_len: int | None = flag(None, "tokens of prompt and response together", gt=1)
    rollout_max_prompt_len: int | None = flag(None, "longer prompts are dropped when the data is loaded", gt=0)
    rollout_max_response_len: int | None = flag(None, "longest response, in tokens", gt=0)
    rollout_skip_special_tokens: bool = flag(False, "leave special tokens out of the response text")
    rollout_stop: list[str] | None = flag(None, "texts that end a response")
    rollout_stop_token_ids: list[int] | None = flag(None, "token ids that end a response")
    rollout_shuffle: bool = flag(False, "shuffle the prompts in every epoch, with seed --rollout-seed + epoch")
    rollout_seed: int = flag(42, "seed of the shuffle and of deterministic sampling")
    over_sampling_batch_size: int | None = flag(
        None, "prompts submitted per wave; more than --rollout-batch-size makes up for filtered groups", gt=0
    )
    dynamic_sampling_filter_path: DottedPath | None = flag(
        None, "dotted path of a function that keeps or drops a group"
    )
    partial_rollout: bool = flag(False, "put unfinished groups back into the buffer instead of throwing them away")
    mask_offpolicy_in_partial_rollout: bool = flag(False, "no loss on tokens that earlier rollouts generated")
    custom_generate_function_path: DottedPath | None = flag(None, "dotted path of a function that generates one sample")
    rollout_sample_hook_path: list[DottedPath] = flag(
        [], "dotted path of a hook between generation and reward; may be repeated", repeat=True
    )
    custom_rollout_log_function_path: DottedPath | None = flag(None, "dotted path of a function that logs a rollout")
    custom_eval_rollout_log_function_path: DottedPath | None = flag(
        None, "dotted path of a function that logs an evaluation"
    )
    buffer_filter_path: DottedPath | None = flag(
        None, "dotted path of a function that picks groups from the buffer; default: the oldest"
    )
    rollout_data_postprocess_path: DottedPath | None = flag(
        None, "dotted path of a trainer hook called after advantages are known"
    )
    rollout_data_transport: Literal["object-store", "nixl"] = flag(
        "object-store", "how train data travels to the trainers"
    )
    rollout_sample_filter_path: DottedPath | None = flag(
        None, "dotted path of a function that marks samples to leave out of the loss"
    )
    rollout_all_samples_process_path: DottedPath | None = flag(
        None, "dotted path of a function that sees dropped groups too"
    )
    rollout_buffer_url: str | None = flag(None, "address of the rollout-buffer plug-in")
    fetch_trajectory_retry_times: int = flag(-1, "attempts of the rollout-buffer plug-in; -1: forever")
    min_batch_collection_ratio: float = flag(1.0, "without effect in slime <= 0.3.1")
    rollout_task_type: str = flag("math", "task name of the rollout-buffer plug-in")
    loss_mask_type: Literal["qwen", "qwen3", "qwen3_5", "distill_qwen"] = flag(
        "qwen", "how the loss mask of chat messages is built"
    )
    rollout_request_timeout: float = flag(1800.0, "seconds one generate request may take", gt=0)
    sglang_router_ip: str | None = flag(None, "address of a running router; no router is started then")
    sglang_router_port: int | None = flag(None, "port of the router", ge=1, le=65535)
    sglang_router_request_timeout_secs: int = flag(14400, "seconds the router lets one request run", gt=0)
    sglang_server_concurrency: int = flag(512, "requests in flight per engine", gt=0)
    prefill_num_servers: int | None = flag(None, "number of prefill engines; the others decode", ge=1)
    sglang_config: str | None = flag(None, "YAML file that describes several models and engine groups")
