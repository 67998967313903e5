"""Evaluation during the run."""

from __future__ import annotations

from slime.arguments.group import ArgumentGroup, DottedPath, flag


class Eval(ArgumentGroup):
    """Evaluation. Values that are not given fall back to those of the rollout."""

    title = "evaluation"

    eval_function_path: DottedPath | None = flag(
        None, "dotted path of the evaluation function; default: --rollout-function-path"
    )
    eval_interval: int | None = flag(
        None, "evaluate every N rollouts and at the end of every epoch; default: never", ge=1
    )
    eval_prompt_data: list[str] | None = flag(
        None, "data sets to evaluate, as pairs of a name and a file; a single file is named aime"
    )
    eval_config: str | None = flag(None, "YAML or JSON file of evaluation data sets; wins over --eval-prompt-data")
    skip_eval_before_train: bool = flag(False, "do not evaluate before the first rollout")
    eval_input_key: str | None = flag(None, "column of the prompt in evaluation data; default: --input-key")
    eval_label_key: str | None = flag(None, "column of the label in evaluation data; default: --label-key")
    eval_tool_key: str | None = flag(None, "column of the tool list in evaluation data; default: --tool-key")
    n_samples_per_eval_prompt: int = flag(1, "responses per prompt in evaluation", ge=1)
    eval_temperature: float | None = flag(
        None, "sampling temperature in evaluation; default: --rollout-temperature", ge=0
    )
    eval_top_p: float | None = flag(None, "nucleus sampling in evaluation; default: --rollout-top-p", gt=0, le=1)
    eval_top_k: int | None = flag(None, "sample among the k likeliest tokens in evaluation; default: --rollout-top-k")
    eval_max_response_len: int | None = flag(
        None, "largest number of tokens of a response in evaluation; default: --rollout-max-response-len", gt=0
    )
    eval_max_prompt_len: int | None = flag(
        None, "largest number of tokens of a prompt in evaluation; longer ones are left out. Default: no limit", gt=0
    )
    eval_min_new_tokens: int | None = flag(
        None, "least number of tokens of a response in evaluation; default: no limit", ge=0
    )
    eval_max_context_len: int | None = flag(
        None,
        "largest number of tokens of prompt and response together in evaluation; default: --rollout-max-context-len",
        gt=1,
    )
