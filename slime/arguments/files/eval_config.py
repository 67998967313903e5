"""Evaluation data sets: ``--eval-config`` (YAML or JSON) and ``--eval-prompt-data``."""

from __future__ import annotations

import copy
from argparse import Namespace
from dataclasses import dataclass, field, fields
from typing import Any

from slime.arguments.errors import ArgumentError
from slime.arguments.files import eval_file


@dataclass
class EvalDatasetConfig:
    """One evaluation data set with its sampling, reward and column settings.

    Every field that neither the file nor its ``defaults`` give falls back to the arguments (``FALLBACKS``).
    """

    name: str
    path: str
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    min_eval_samples: int | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    multimodal_keys: dict[str, str] | None = None
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    custom_rm_path: str | None = None
    rm_type: str | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)
    app_service: Any = None
    eval_task_timeout: float | None = None
    eval_early_stop_remaining: int | None = None
    eval_early_stop_idle_timeout: float | None = None
    message_processor: Any = None
    reward_model: Any = None
    remote_environment: Any = None

    def __post_init__(self) -> None:
        if self.min_eval_samples is not None and self.min_eval_samples <= 0:
            raise ValueError(f"data set {self.name}: min_eval_samples must be positive, got {self.min_eval_samples}")
        self.metadata_overrides = dict(self.metadata_overrides or {})

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """What decides which rows are loaded."""
        return (self.name, self.path, self.input_key, self.label_key, self.tool_key, self.metadata_key)

    def inject_metadata(self, sample_metadata: dict[str, Any] | None) -> dict[str, Any]:
        """A copy of ``sample_metadata`` with this data set's ``rm_type`` and ``metadata_overrides``."""
        metadata = copy.deepcopy(sample_metadata) if isinstance(sample_metadata, dict) else {}
        if self.rm_type is not None:
            metadata["rm_type"] = self.rm_type
        metadata.update(copy.deepcopy(self.metadata_overrides))
        return metadata


FALLBACKS: dict[str, tuple[str, ...]] = {
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt", "n_samples_per_prompt"),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "stop": ("rollout_stop",),
    "stop_token_ids": ("rollout_stop_token_ids",),
    "min_new_tokens": ("eval_min_new_tokens",),
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
    "multimodal_keys": ("multimodal_keys",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
    "custom_rm_path": ("eval_custom_rm_path", "custom_rm_path"),
}
# Kept for evaluation functions and plug-ins of users; the built-in evaluation does not read them.
FOR_PLUGINS = (
    "min_eval_samples", "app_service", "eval_task_timeout", "eval_early_stop_remaining", "eval_early_stop_idle_timeout",
    "message_processor", "reward_model", "remote_environment",
)  # fmt: skip
FIELD_NAMES = tuple(f.name for f in fields(EvalDatasetConfig))
DEFAULT_NAMES = frozenset(FIELD_NAMES) - {"name", "path"}


def build_eval_dataset_configs(
    args: Namespace,
    raw_config: list[dict[str, Any]] | dict[str, dict[str, Any]],
    defaults: dict[str, Any] | None = None,
) -> list[EvalDatasetConfig]:
    """Data sets from the entries of a file: the entry wins, then ``defaults``, then the arguments.

    Raises ``ValueError`` for unknown keys in ``defaults``, an empty list or an entry without name; ``TypeError`` for
    unknown keys of an entry.
    """
    defaults = dict(defaults or {})
    unknown = sorted(set(defaults) - DEFAULT_NAMES)
    if unknown:
        raise ValueError(
            f"unknown keys in defaults: {', '.join(unknown)}; known are {', '.join(sorted(DEFAULT_NAMES))}"
        )
    if isinstance(raw_config, dict):
        raw_config = [{"name": name, **(entry or {})} for name, entry in raw_config.items()]
    if not raw_config:
        raise ValueError("no data sets: `datasets` is empty")
    found = [_build(args, dict(entry), defaults) for entry in raw_config]
    names = [dataset.name for dataset in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"data set names must be unique: {', '.join(twice)} appears twice")
    return found


def _build(args: Namespace, entry: dict[str, Any], defaults: dict[str, Any]) -> EvalDatasetConfig:
    if not entry.get("name"):
        raise ValueError(f"a data set has no name: {entry}")
    unknown = sorted(set(entry) - set(FIELD_NAMES))
    if unknown:
        raise TypeError(
            f"data set {entry['name']}: unknown keys {', '.join(unknown)}; known are {', '.join(FIELD_NAMES)}"
        )
    if not entry.get("path"):
        raise ValueError(f"data set {entry['name']} has no path")
    values = {**defaults, **entry}
    for name, attributes in FALLBACKS.items():
        if values.get(name) is None:
            values[name] = next((v for a in attributes if (v := getattr(args, a, None)) is not None), None)
    return EvalDatasetConfig(**values)


def datasets_from_args(args: Namespace) -> list[EvalDatasetConfig]:
    """The data sets of ``--eval-config``, else of ``--eval-prompt-data``, else none. Raises ``ArgumentError``."""
    if args.eval_config is not None:
        entries, defaults = eval_file.read(args.eval_config)
        return build_eval_dataset_configs(args, entries, defaults)
    pairs = args.eval_prompt_data
    if not pairs:
        return []
    if len(pairs) == 1:
        if not set("./") & set(pairs[0]):
            raise ArgumentError(f"--eval-prompt-data {pairs[0]}: a name without a path; give both: {pairs[0]} PATH")
        pairs = ["aime", pairs[0]]
    if len(pairs) % 2 != 0:
        raise ArgumentError(
            f"--eval-prompt-data takes pairs of name and path, got {len(pairs)} words: {' '.join(pairs)}"
        )
    entries = [{"name": name, "path": path} for name, path in zip(pairs[::2], pairs[1::2], strict=True)]
    try:
        return build_eval_dataset_configs(args, entries)
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"--eval-prompt-data: {error}") from error
