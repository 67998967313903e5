"""Evaluation during the run."""

from __future__ import annotations

from slime.arguments.group import ArgumentGroup, flag
from slime.arguments.types import DottedPath


class Eval(ArgumentGroup):
    """Evaluation. Values that are not given fall back to those of the rollout."""

    title = "evaluation"

    eval_function_path: DottedPath | None = flag(
        None, "dotted path of the evaluation function; default: --rollout-function-path"
    )
    eval_interval: int | None = flag(None, "evaluate every N rollouts and at the end of every epoch", ge=1)
    eval_prompt_data: list[str] | None = flag(None, "pairs of name and path; a single path is named aime")
    eval_config: str | None = flag(None, "YAML or JSON file of evaluation data sets; wins over --eval-prompt-data")
    skip_eval_before_train: bool = flag(False, "no evaluation before the first rollout")
    eval_input_key: str | None = flag(None, "column of the prompt; default: --input-key")
    eval_label_key: str | None = flag(None, "column of the label; default: --label-key")
    eval_tool_key: str | None = flag(None, "column of the tool list; default: --tool-key")
    n_samples_per_eval_prompt: int = flag(1, "responses per prompt", ge=1)
    eval_temperature: float | None = flag(None, "default: --rollout-temperature", ge=0)
    eval_top_p: float | None = flag(None, "default: --rollout-top-p", gt=0, le=1)
    eval_top_k: int | None = flag(None, "default: --rollout-top-k")
    eval_max_response_len: int | None = flag(None, "default: --rollout-max-response-len", gt=0)
    eval_max_prompt_len: int | None = flag(None, "longer prompts are left out of evaluation", gt=0)
    eval_min_new_tokens: int | None = flag(None, "shortest response, in tokens", ge=0)
    eval_max_context_len: int | None = flag(None, "default: --rollout-max-context-len", gt=1)
