"""Evaluation data sets: ``--eval-config`` (YAML or JSON) and ``--eval-prompt-data``."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from slime.algorithms.reward_types import unboxed
from slime.arguments.errors import ArgumentError
from slime.arguments.files.schema import Count, FileModel, Number, check_unique, unknown_key, validate
from slime.arguments.files.yaml_source import Document, KeyPath, seen
from slime.arguments.files.yaml_source import read as read_yaml
from slime.arguments.group import DottedPath
from slime.utils.declared import with_defaults

if TYPE_CHECKING:
    from slime.arguments.args import Args


def _listed(value: object) -> Any:
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


OPTION = "--eval-config"


def read(path: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The data sets of the file ``path`` and its ``defaults``, both as the file gives them.

    Raises ``ArgumentError`` for all mistakes at once.
    """
    document = read_yaml(path, OPTION)
    _resolve_references(document)
    section: KeyPath = ("eval",) if "eval" in document.data else ()
    if section and not isinstance(document.data["eval"], dict):
        got = seen(document.data["eval"])
        document.note(section, f"expected `defaults` and `datasets`, indented below it, got {got}")
        document.check()
    _check_keys(document, section)
    defaults: dict[str, Any] = {}
    if document.value((*section, "defaults")) is not None:
        found = validate(document, EvalDefaults, (*section, "defaults"))
        defaults = found.model_dump(exclude_unset=True) if found is not None else {}
    entries = _entries(document, (*section, "datasets"))
    document.check()
    return entries, defaults


def _check_keys(document: Document, section: KeyPath) -> None:
    """Keys beside ``defaults`` and ``datasets`` are mistakes, unless an interpolation refers to them."""
    known = [*EvalSection.model_fields, *(() if section else ("eval",))]
    for name in document.value(section) if section else document.data:
        if name not in known and not document.mentions("${" + str(name)):
            document.note((*section, name), unknown_key(str(name), known))
    misplaced = [name for name in EvalSection.model_fields if section and name in document.data]
    for name in misplaced:
        document.note((name,), "belongs below `eval:`; indent it by two more spaces")


def _entries(document: Document, at: KeyPath) -> list[dict[str, Any]]:
    datasets = document.value(at)
    if not datasets or not isinstance(datasets, list | dict):
        got = f", got {seen(datasets)}" if isinstance(datasets, str | int) else ""
        document.note(at, f"no data sets: expected a list of mappings with name and path{got}")
        return []
    if isinstance(datasets, dict) and isinstance(datasets.get("path"), str):
        document.note(at, "expected a list; start every data set with a dash: `- name: ...`")
        return []
    found = []
    for key in datasets if isinstance(datasets, dict) else range(len(datasets)):
        if isinstance(datasets, dict) and isinstance(datasets[key], dict | None):
            datasets[key] = {"name": key, **(datasets[key] or {})}
        dataset = validate(document, EvalDataset, (*at, key))
        if dataset is not None:
            found.append((key, dataset))
    check_unique(document, [((*at, key, "name"), dataset.name) for key, dataset in found])
    return [dataset.model_dump(exclude_unset=True) for _, dataset in found]


def _resolve_references(document: Document) -> None:
    """Replace every interpolation in ``document.data``; what cannot be resolved raises ``ArgumentError``."""
    if not document.mentions("${"):
        return
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        data = OmegaConf.to_container(OmegaConf.create(document.data), resolve=True)
    except OmegaConfBaseException as error:
        first = str(error).splitlines()[0]
        document.note(_key_path(error.full_key), f"{first}; `${{name}}` stands for another key of this file")
        document.check()
        raise
    document.data = data  # type: ignore[assignment]


def _key_path(full_key: str | None) -> KeyPath:
    """``("datasets", 0, "path")`` for ``datasets[0].path``."""
    steps = re.findall(r"\[(\d+)\]|([^.\[\]]+)", full_key or "")
    return tuple(int(place) if place else name for place, name in steps)


def _from(*fallbacks: str, off_by_null: bool = False) -> dict[str, Any]:
    """Describe a field that falls back to the first of these arguments that has a value.

    ``off_by_null``: null in a file switches it off; for other fields null means that nothing is given.
    """
    return {"fallbacks": fallbacks, "off_by_null": off_by_null}


@dataclass
class EvalDatasetConfig:
    """One evaluation data set with its sampling, reward and column settings.

    Every field that neither the file nor its ``defaults`` give falls back to the arguments (``FALLBACKS``); null in the
    file switches those of ``OFF_BY_NULL`` off. Of ``rm_type`` and ``custom_rm_path`` the one that is given nearer to
    the data set holds.
    """

    name: str
    path: str
    n_samples_per_eval_prompt: int | None = field(
        default=None, metadata=_from("n_samples_per_eval_prompt", "n_samples_per_prompt")
    )
    temperature: float | None = field(default=None, metadata=_from("eval_temperature", "rollout_temperature"))
    top_p: float | None = field(default=None, metadata=_from("eval_top_p", "rollout_top_p"))
    top_k: int | None = field(default=None, metadata=_from("eval_top_k", "rollout_top_k"))
    max_response_len: int | None = field(
        default=None, metadata=_from("eval_max_response_len", "rollout_max_response_len", off_by_null=True)
    )
    stop: list[str] | None = field(default=None, metadata=_from("rollout_stop", off_by_null=True))
    stop_token_ids: list[int] | None = field(default=None, metadata=_from("rollout_stop_token_ids", off_by_null=True))
    min_new_tokens: int | None = field(default=None, metadata=_from("eval_min_new_tokens", off_by_null=True))
    min_eval_samples: int | None = None
    input_key: str | None = field(default=None, metadata=_from("eval_input_key", "input_key"))
    label_key: str | None = field(default=None, metadata=_from("eval_label_key", "label_key", off_by_null=True))
    tool_key: str | None = field(default=None, metadata=_from("eval_tool_key", "tool_key", off_by_null=True))
    metadata_key: str | None = field(default=None, metadata=_from("metadata_key"))
    multimodal_keys: dict[str, str] | None = field(default=None, metadata=_from("multimodal_keys", off_by_null=True))
    apply_chat_template: bool | None = field(default=None, metadata=_from("apply_chat_template"))
    apply_chat_template_kwargs: dict[str, Any] | None = field(
        default=None, metadata=_from("apply_chat_template_kwargs", off_by_null=True)
    )
    custom_rm_path: str | None = field(
        default=None, metadata=_from("eval_custom_rm_path", "custom_rm_path", off_by_null=True)
    )
    rm_type: str | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    custom_generate_function_path: str | None = field(default=None, metadata=_from(off_by_null=True))
    metadata_overrides: dict[str, Any] = field(default_factory=dict)
    app_service: Any = None
    eval_task_timeout: float | None = None
    eval_early_stop_remaining: int | None = None
    eval_early_stop_idle_timeout: float | None = None
    message_processor: Any = None
    reward_model: Any = None
    remote_environment: Any = None
    switched_off: frozenset[str] = frozenset()
    """Fields for which neither this data set nor the run has a value here."""

    def __post_init__(self) -> None:
        if self.min_eval_samples is not None and self.min_eval_samples <= 0:
            raise ValueError(f"data set {self.name}: min_eval_samples must be positive, got {self.min_eval_samples}")
        self.metadata_overrides = dict(self.metadata_overrides or {})

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """Values that decide which rows are loaded."""
        return (self.name, self.path, self.input_key, self.label_key, self.tool_key, self.metadata_key)

    def inject_metadata(self, sample_metadata: dict[str, Any] | None) -> dict[str, Any]:
        """A copy of ``sample_metadata`` with this data set's ``rm_type`` and ``metadata_overrides``."""
        metadata = copy.deepcopy(sample_metadata) if isinstance(sample_metadata, dict) else {}
        if self.rm_type is not None:
            metadata["rm_type"] = self.rm_type
        metadata.update(copy.deepcopy(self.metadata_overrides))
        return metadata


FALLBACKS: dict[str, tuple[str, ...]] = {
    field.name: field.metadata["fallbacks"] for field in fields(EvalDatasetConfig) if field.metadata.get("fallbacks")
}
OFF_BY_NULL = tuple(field.name for field in fields(EvalDatasetConfig) if field.metadata.get("off_by_null"))
# Kept for evaluation functions and plug-ins of users; the built-in evaluation does not read them.
FOR_PLUGINS = (
    "min_eval_samples", "app_service", "eval_task_timeout", "eval_early_stop_remaining", "eval_early_stop_idle_timeout",
    "message_processor", "reward_model", "remote_environment",
)  # fmt: skip
FIELD_NAMES = tuple(f.name for f in fields(EvalDatasetConfig) if f.name != "switched_off")
DEFAULT_NAMES = frozenset(FIELD_NAMES) - {"name", "path"}


def build_eval_dataset_configs(
    args: Args,
    raw_config: list[dict[str, Any]] | dict[str, dict[str, Any]],
    defaults: dict[str, Any] | None = None,
    rm_types: Collection[str] | None = None,
) -> list[EvalDatasetConfig]:
    """Data sets from the entries of a file: the entry wins, then ``defaults``, then the arguments.

    ``rm_types`` are the built-in rewards, None for any: another ``rm_type`` is left to the run's own function.
    Raises ``ValueError`` for unknown keys in ``defaults``, an empty list or an entry without name; ``TypeError`` for
    unknown keys of an entry.
    """
    args = with_defaults(args)
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
    found = [_build(args, dict(entry), defaults, rm_types) for entry in raw_config]
    names = [dataset.name for dataset in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"data set names must be unique: {', '.join(twice)} appears twice")
    return found


def _build(
    args: Args, entry: dict[str, Any], defaults: dict[str, Any], rm_types: Collection[str] | None
) -> EvalDatasetConfig:
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
    off = {name for name in OFF_BY_NULL if name in values and values[name] is None}
    if _has_nearer_type(entry, defaults, rm_types):
        values["custom_rm_path"] = None
        off.add("custom_rm_path")
    for name, attributes in FALLBACKS.items():
        if values.get(name) is None and name not in off:
            values[name] = next((v for a in attributes if (v := getattr(args, a, None)) is not None), None)
    return EvalDatasetConfig(**values, switched_off=frozenset(off))


def _has_nearer_type(entry: dict[str, Any], defaults: dict[str, Any], rm_types: Collection[str] | None) -> bool:
    """Return True if one of ``rm_types`` is given nearer to the data set than a ``custom_rm_path`` (or the run's)."""
    levels = [level for level in (entry, defaults) if "rm_type" in level or "custom_rm_path" in level]
    nearest = levels[0] if levels else {}
    rm_type = nearest.get("rm_type")
    if rm_type is None or nearest.get("custom_rm_path") is not None:
        return False
    return rm_types is None or unboxed(str(rm_type)) in rm_types


def own_path(dataset: object, name: str) -> str | None:
    """The data set's function of that name: "" where it switches that of the run off, None where that one holds."""
    path: str | None = getattr(dataset, name, None)
    return "" if path is None and name in getattr(dataset, "switched_off", ()) else path


def datasets_from_args(args: Args, rm_types: Collection[str] | None = None) -> list[EvalDatasetConfig]:
    """The data sets of ``--eval-config``, else of ``--eval-prompt-data``, else none. Raises ``ArgumentError``."""
    if args.eval_config is not None:
        entries, defaults = read(args.eval_config)
        return build_eval_dataset_configs(args, entries, defaults, rm_types)
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
