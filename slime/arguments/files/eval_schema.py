"""The keys of an ``--eval-config`` file."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from slime.arguments.files.schema import Count, FileModel, Number
from slime.arguments.types import DottedPath


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str | int) and not isinstance(value, bool) else value


class EvalDefaults(FileModel):
    """``defaults``: what holds for every data set that does not say otherwise."""

    n_samples_per_eval_prompt: Count | None = Field(default=None, ge=1, description="responses per prompt")
    temperature: Number | None = Field(default=None, ge=0, description="sampling temperature, 0 is greedy")
    top_p: Number | None = Field(default=None, gt=0, le=1, description="nucleus sampling")
    top_k: Count | None = Field(default=None, ge=-1, description="tokens to choose from, -1 for all")
    max_response_len: Count | None = Field(default=None, ge=1, description="tokens of a response at most")
    stop: Annotated[list[str], BeforeValidator(_listed)] | None = Field(
        default=None, description="texts that end a response"
    )
    stop_token_ids: Annotated[list[Count], BeforeValidator(_listed)] | None = Field(
        default=None, description="tokens that end a response"
    )
    min_new_tokens: Count | None = Field(default=None, ge=0, description="tokens of a response at least")
    repetition_penalty: Number | None = Field(default=None, gt=0, description="above 1 discourages repetition")
    skip_special_tokens: bool | None = Field(default=None, description="leave special tokens out of the text")
    no_stop_trim: bool | None = Field(default=None, description="keep the stop text in the response")
    input_key: str | None = Field(default=None, description="column of the prompt")
    label_key: str | None = Field(default=None, description="column of the label")
    tool_key: str | None = Field(default=None, description="column of the tools")
    metadata_key: str | None = Field(default=None, description="column of the metadata")
    multimodal_keys: dict[str, str] | None = Field(default=None, description="media type -> column")
    apply_chat_template: bool | None = Field(default=None, description="whether prompts are chats")
    apply_chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="the chat template's arguments")
    rm_type: str | None = Field(default=None, description="reward, written into the metadata of every sample")
    custom_rm_path: DottedPath | None = Field(default=None, description="reward function")
    custom_generate_function_path: DottedPath | None = Field(default=None, description="generation function")
    metadata_overrides: dict[str, Any] | None = Field(default=None, description="added to the metadata of samples")
    min_eval_samples: Count | None = Field(default=None, ge=1, description="for plug-ins")
    eval_task_timeout: Number | None = Field(default=None, gt=0, description="for plug-ins, seconds")
    eval_early_stop_remaining: Count | None = Field(default=None, ge=0, description="for plug-ins")
    eval_early_stop_idle_timeout: Number | None = Field(default=None, ge=0, description="for plug-ins, seconds")
    app_service: Any = Field(default=None, description="for plug-ins")
    message_processor: Any = Field(default=None, description="for plug-ins")
    reward_model: Any = Field(default=None, description="for plug-ins")
    remote_environment: Any = Field(default=None, description="for plug-ins")


class EvalDataset(EvalDefaults):
    """One entry of ``datasets``; in a mapping of data sets the key is the name."""

    name: str = Field(min_length=1, description="name in the metrics")
    path: str = Field(min_length=1, description="`.jsonl`, `.json` or `.parquet` file, `path@[a:b]` for a slice")


class EvalSection(FileModel):
    """The file, or its part below `eval:`."""

    defaults: EvalDefaults | None = Field(
        default=None, description="what holds for every data set that does not say otherwise"
    )
    datasets: list[EvalDataset] = Field(description="list of data sets, or a mapping of names to data sets")
