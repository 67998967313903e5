"""Generation, for training and for evaluation."""

from __future__ import annotations

from typing import Literal

from slime.arguments.group import ArgumentGroup, DottedPath, flag
from slime.arguments.traits import Contract

DEFAULT_ROLLOUT = "slime.rollout.sglang_rollout.generate_rollout"
FULLY_ASYNC_ROLLOUT = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
GENERATE_WITH_ENGINES = (DEFAULT_ROLLOUT, FULLY_ASYNC_ROLLOUT)
"""Built-in rollout functions that share generation, rewards and evaluation."""


class Rollout(ArgumentGroup):
    """Generation: sampling, groups, filters, custom functions."""

    title = "rollout generation"
    read_by = "run"

    hf_checkpoint: str = flag(
        None,
        "Hugging Face checkpoint directory: tokenizer, engine weights, names of exported weights",
        required=True,
        read_by="trainers",
        path="model",
        decides_generation=True,
    )
    model_name: str | None = flag(
        None,
        "model family, for the names of exported weights; default: from the checkpoint's config.json",
        read_by="trainers",
    )
    rollout_function_path: DottedPath = flag(
        DEFAULT_ROLLOUT,
        "dotted path of the function that produces one rollout",
        hook=Contract("fn(args, rollout_id, data_source, evaluation=False)", 3, ("evaluation",), makes_samples=True),
        decides_generation=True,
    )
    rollout_temperature: float = flag(
        1.0,
        "sampling temperature; the trainer divides its logits by it too",
        gt=0,
        read_by="trainers",
        decides_generation=True,
    )
    rollout_top_p: float = flag(
        1.0,
        "nucleus sampling: among the likeliest tokens whose probabilities add up to this; 1: all. Training takes "
        "log-probs among the same tokens, which the engines report",
        gt=0,
        le=1,
        decides_generation=True,
    )
    rollout_top_k: int = flag(
        -1,
        "sample among the k likeliest tokens; -1: all",
        silenced_by=("rollout without samples",),
        decides_generation=True,
    )
    rollout_max_context_len: int | None = flag(
        None,
        "largest number of tokens of prompt and response together; default: no limit but the engine's",
        gt=1,
        decides_generation=True,
    )
    rollout_max_prompt_len: int | None = flag(
        None,
        "largest number of tokens of a prompt; longer ones are dropped when the data is loaded. Default: one "
        "less than --rollout-max-context-len, else than the longest sequence that the engines take",
        gt=0,
        decides_generation=True,
    )
    rollout_max_response_len: int | None = flag(
        None, "largest number of tokens of a response", gt=0, decides_generation=True
    )
    rollout_skip_special_tokens: bool = flag(
        False, "leave special tokens out of the response text", decides_generation=True
    )
    rollout_stop: list[str] | None = flag(
        None,
        "texts that end a response, besides the end-of-text token",
        silenced_by=("rollout without samples",),
        decides_generation=True,
    )
    rollout_stop_token_ids: list[int] | None = flag(
        None,
        "token ids that end a response, besides the end-of-text token",
        silenced_by=("rollout without samples",),
        decides_generation=True,
    )
    rollout_shuffle: bool = flag(
        False,
        "shuffle the prompts anew in every epoch, with seed --rollout-seed + epoch; default: in the order of the file",
        silenced_by=("no data set",),
        decides_generation=True,
    )
    rollout_seed: int = flag(42, "seed of the shuffle and of deterministic sampling", decides_generation=True)
    over_sampling_batch_size: int | None = flag(
        None,
        "prompts submitted at a time; more than --rollout-batch-size makes up for groups that "
        "--dynamic-sampling-filter-path drops. Default: --rollout-batch-size",
        gt=0,
        follows="rollout_batch_size",
        silenced_by=("rollout without hooks", "own rollout", "fully asynchronous", "replay"),
    )
    dynamic_sampling_filter_path: DottedPath | None = flag(
        None,
        "dotted path of a function that keeps or drops the finished group of a prompt; default: all are kept",
        hook=Contract("fn(args, group, **kwargs)", 2, generates=True),
        silenced_by=("rollout without hooks", "own rollout", "replay"),
    )
    partial_rollout: bool = flag(
        False,
        "put unfinished groups back into the buffer, to be continued by a later rollout, instead of throwing them away",
        silenced_by=("rollout without hooks", "own rollout", "nothing left over", "replay"),
        decides_generation=True,
    )
    mask_offpolicy_in_partial_rollout: bool = flag(
        False,
        "no loss on tokens that earlier rollouts generated, with --partial-rollout; in the fully asynchronous rollout: "
        "on tokens older than the newest weights of their response",
    )
    max_staleness: int | None = flag(
        None,
        "the largest number of training steps that the weights that made a token may lag behind those that are trained "
        "on it; groups that would lag more wait to begin (fully asynchronous rollout), or begin again. 0: only tokens "
        "of the newest weights. Default: no limit",
        ge=0,
    )
    custom_generate_function_path: DottedPath | None = flag(
        None,
        "dotted path of your own function that generates for one sample (tools, several turns); default: one "
        "request to the engines",
        hook=Contract(
            "fn(args, sample, sampling_params[, evaluation])",
            3,
            offered=("evaluation",),
            generates=True,
            makes_samples=True,
            changes_samples=True,
        ),
        silenced_by=("rollout without samples", "replay"),
        decides_generation=True,
    )
    rollout_sample_hook_path: list[DottedPath] = flag(
        [],
        "dotted path of a hook between generation and reward; may be repeated",
        repeat=True,
        hook=Contract(
            "fn(args, sample, *, rollout_id=None, evaluation=False)",
            2,
            offered=("rollout_id", "evaluation"),
            generates=True,
            makes_samples=True,
            changes_samples=True,
        ),
        silenced_by=("rollout without samples", "replay"),
        decides_generation=True,
    )
    custom_rollout_log_function_path: DottedPath | None = flag(
        None,
        "dotted path of your own function that logs a rollout, instead of or besides the built-in metrics",
        hook=Contract("fn(rollout_id, args, samples, rollout_extra_metrics, rollout_time)", 5),
    )
    custom_eval_rollout_log_function_path: DottedPath | None = flag(
        None,
        "dotted path of your own function that logs an evaluation, instead of or besides the built-in metrics",
        hook=Contract("fn(rollout_id, args, data, extra_metrics)", 4),
        needs="--eval-interval",
    )
    buffer_filter_path: DottedPath | None = flag(
        None,
        "dotted path of a function that picks groups from the buffer; default: the oldest",
        hook=Contract("fn(args, rollout_id, buffer, num_samples)", 4, generates=True),
    )
    rollout_data_postprocess_path: DottedPath | None = flag(
        None,
        "dotted path of a trainer hook that may change the train data after advantages are computed",
        read_by="trainers",
        hook=Contract("fn(args, rollout_id, rollout_data)", 3, caller="trainer"),
    )
    rollout_data_transport: Literal["object-store", "nixl"] = flag(
        "object-store",
        "how train data travels from the rollout manager to the trainers: through Ray's object store, or by NIXL from "
        "its memory to theirs",
        silenced_by=("no trainer",),
    )
    rollout_sample_filter_path: DottedPath | None = flag(
        None,
        "dotted path of a function that marks samples of a finished rollout to leave out of the loss",
        hook=Contract("fn(args, groups)", 2, generates=True, makes_samples=True, changes_samples=True),
        silenced_by=("rollout without hooks", "own rollout", "replay"),
    )
    rollout_all_samples_process_path: DottedPath | None = flag(
        None,
        "dotted path of a function that sees all samples of a rollout, those of dropped groups too",
        hook=Contract("fn(args, all_groups, get_samples)", 3, generates=True, changes_samples=True),
        silenced_by=("rollout without hooks", "own rollout", "replay"),
    )
    rollout_buffer_url: str | None = flag(None, "address of the rollout buffer that trajectories are fetched from")
    fetch_trajectory_retry_times: int = flag(
        -1,
        "fetches from the rollout buffer in a row that may bring nothing, each of 30 seconds; -1: forever",
        ge=-1,
        needs="--rollout-buffer-url",
    )
    min_batch_collection_ratio: float = flag(
        1.0, "accepted for old launch scripts", inert="it never had an effect; leave it out"
    )
    rollout_task_type: str = flag(
        "math", "TASK_TYPE of the generator that the rollout buffer is to start", needs="--rollout-buffer-url"
    )
    loss_mask_type: Literal["qwen", "qwen3", "qwen3_5", "distill_qwen"] = flag(
        "qwen",
        "chat format by which the loss mask of messages is found (SFT and agents): what the assistant said is trained",
    )
    rollout_request_timeout: float = flag(1800.0, "seconds one request to an engine may take", gt=0)
    max_prompt_attempts: int = flag(
        3,
        "how often a prompt is generated whose generate function or environment gives it up, while others succeed; "
        "after that its samples have the reward 0 and are left out of the loss",
        ge=1,
    )
    service_outage_timeout: float = flag(
        1800.0,
        "seconds for which an environment, a generate function or the server of a reward may fail for all before the "
        "run ends; meanwhile generation pauses, and tries again after growing waits",
        gt=0,
    )
    sglang_router_ip: str | None = flag(None, "address of a running router; no router is started then")
    sglang_router_port: int | None = flag(
        None, "port of that router, or of the one that is started; default: a free one", ge=1, le=65535
    )
    sglang_router_package: Literal["auto", "smg", "sglang_router"] = flag(
        "auto",
        "which router is started; auto: smg where it is installed, else sglang-router, as for slime serve and "
        "--rollout-buffer-url, whose clients may name models that smg does not know",
    )
    sglang_router_request_timeout_secs: int = flag(14400, "seconds the router lets one request run", gt=0)
    sglang_routing_key: Literal["session", "group"] = flag(
        "session",
        "what keeps requests on one engine under --router-policy manual or consistent_hashing: the session of each "
        "sample, or the prompt that the samples of a group share; turns of agents always follow their session",
        needs="--router-policy manual or consistent_hashing",
    )
    sglang_server_concurrency: int = flag(
        512, "requests in flight per engine; further ones wait in the rollout manager", gt=0
    )
    prefill_num_servers: int | None = flag(
        None,
        "engines that only prefill; all others decode (prefill-decode disaggregation). Default: every engine does both",
        deploys=True,
        ge=1,
    )
    sglang_config: str | None = flag(
        None,
        "YAML file that describes several models and groups of engines; default: one model on --rollout-num-gpus slots",
        deploys=True,
        path="file",
    )


class Eval(ArgumentGroup):
    """Evaluation. Values that are not given fall back to those of the rollout."""

    title = "evaluation"
    read_by = "run"

    eval_function_path: DottedPath | None = flag(
        None,
        "dotted path of the evaluation function; default: --rollout-function-path",
        hook=Contract("fn(args, rollout_id, data_source, evaluation=False)", 3, ("evaluation",)),
        follows="rollout_function_path",
        needs="--eval-interval",
    )
    eval_interval: int | None = flag(
        None,
        "evaluate every N rollouts and at the end of every epoch; default: never",
        ge=1,
        silenced_by=("no engines",),
    )
    eval_prompt_data: list[str] | None = flag(
        None,
        "data sets to evaluate, as pairs of a name and a file; a single file is named aime",
        needs="--eval-interval",
        silenced_by=("no engines", "--eval-config"),
    )
    eval_config: str | None = flag(
        None,
        "YAML or JSON file of evaluation data sets; wins over --eval-prompt-data",
        path="file",
        needs="--eval-interval",
        silenced_by=("no engines",),
    )
    skip_eval_before_train: bool = flag(False, "do not evaluate before the first rollout", needs="--eval-interval")
    eval_input_key: str | None = flag(
        None, "column of the prompt in evaluation data; default: --input-key", needs="--eval-interval"
    )
    eval_label_key: str | None = flag(
        None, "column of the label in evaluation data; default: --label-key", needs="--eval-interval"
    )
    eval_tool_key: str | None = flag(
        None, "column of the tool list in evaluation data; default: --tool-key", needs="--eval-interval"
    )
    n_samples_per_eval_prompt: int = flag(1, "responses per prompt in evaluation", ge=1, needs="--eval-interval")
    eval_temperature: float | None = flag(
        None, "sampling temperature in evaluation; default: --rollout-temperature", ge=0, needs="--eval-interval"
    )
    eval_top_p: float | None = flag(
        None, "nucleus sampling in evaluation; default: --rollout-top-p", gt=0, le=1, needs="--eval-interval"
    )
    eval_top_k: int | None = flag(
        None, "sample among the k likeliest tokens in evaluation; default: --rollout-top-k", needs="--eval-interval"
    )
    eval_max_response_len: int | None = flag(
        None,
        "largest number of tokens of a response in evaluation; default: --rollout-max-response-len",
        gt=0,
        needs="--eval-interval",
    )
    eval_max_prompt_len: int | None = flag(
        None,
        "largest number of tokens of a prompt in evaluation; longer ones are left out. Default: no limit",
        gt=0,
        needs="--eval-interval",
    )
    eval_min_new_tokens: int | None = flag(
        None, "least number of tokens of a response in evaluation; default: no limit", ge=0, needs="--eval-interval"
    )
    eval_max_context_len: int | None = flag(
        None,
        "largest number of tokens of prompt and response together in evaluation; default: --rollout-max-context-len",
        gt=1,
    )


class Environments(ArgumentGroup):
    """Environments that agents act in."""

    title = "environments"
    read_by = "run"

    environment_path: list[DottedPath] | None = flag(
        None,
        "dotted paths of environment classes, with --custom-generate-function-path "
        "slime.rollout.environments.generate; all have the same weight",
        decides_generation=True,
    )
    environment_config: str | None = flag(
        None,
        "YAML file of environments with weights, limits and difficulties, in place of --environment-path",
        path="file",
        decides_generation=True,
    )
