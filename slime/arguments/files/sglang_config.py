"""``--sglang-config``: which models are served, by which groups of engines, with which settings."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import AliasChoices, Field, field_validator

from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError
from slime.arguments.files.flag_values import of_older_flag, typed
from slime.arguments.files.schema import Count, FileModel, check_unique, validate
from slime.arguments.files.yaml_source import Document, KeyPath
from slime.arguments.files.yaml_source import read as read_yaml
from slime.arguments.flag import Flag
from slime.arguments.passthrough import catalog
from slime.arguments.passthrough.sglang import flag_of_record
from slime.utils.declared import with_defaults

OPTION = "--sglang-config"
WorkerType = Literal["regular", "prefill", "decode", "encoder", "placeholder"]


class ServerGroupConfig(FileModel):
    """Engines of one kind with the same settings. A placeholder keeps its slots free of engines."""

    worker_type: WorkerType = Field(
        default="regular", description="what its engines do; a placeholder has none and keeps slots free"
    )
    num_gpus: Count = Field(gt=0, description="slots of the whole group")
    num_gpus_per_engine: Count | None = Field(default=None, gt=0, description="slots of one engine; else the model's")
    overrides: dict[str, Any] = Field(
        default_factory=dict, description="SGLang server arguments that beat everything else"
    )

    @field_validator("overrides", mode="before")
    @classmethod
    def _underscores(cls, value: object) -> Any:
        if not isinstance(value, dict):
            return {} if value is None else value
        return {name.replace("-", "_") if isinstance(name, str) else name: item for name, item in value.items()}

    @property
    def num_engines(self) -> int:
        """Engines that start, once ``ModelConfig.resolve`` has filled in their size."""
        if self.worker_type == "placeholder" or self.num_gpus_per_engine is None:
            return 0
        return self.num_gpus // self.num_gpus_per_engine


class ModelConfig(FileModel):
    """One served model, behind a separate router."""

    name: str = Field(min_length=1, description="name of the model, unique in the file")
    model_path: str | None = Field(default=None, description="Hugging Face checkpoint; else `--hf-checkpoint`")
    update_weights: bool | None = Field(
        default=None,
        description="whether it gets the trainer's weights; else true only for `--hf-checkpoint`",
    )
    num_gpus_per_engine: Count | None = Field(default=None, gt=0, description="else `--rollout-num-gpus-per-engine`")
    server_groups: list[ServerGroupConfig] = Field(
        default_factory=list,
        validation_alias=AliasChoices("server_groups", "engine_groups"),
        description="the engines",
    )

    @property
    def total_num_gpus(self) -> int:
        """Slots of all groups, placeholders included."""
        return sum(group.num_gpus for group in self.server_groups)

    @property
    def has_pd_disaggregation(self) -> bool:
        """True if prompts and responses are computed by different engines."""
        return self._has("prefill", "decode")

    @property
    def has_encoder_disaggregation(self) -> bool:
        """True if images and the like are encoded by separate engines."""
        return self._has("encoder")

    def _has(self, *kinds: str) -> bool:
        return any(group.worker_type in kinds for group in self.server_groups)

    def resolve(self, args: Args) -> ModelConfig:
        """Fill in what the file leaves to the flags, in place, and return the model.

        Every group gets ``num_gpus_per_engine`` and ``overrides["model_path"]``. Raises ``ArgumentError`` when groups
        name different models, or slots make no whole engines.
        """
        args = with_defaults(args)
        self.model_path = self._one_path(args)
        if self.update_weights is None:
            self.update_weights = _is_same(self.model_path, args.hf_checkpoint)
            if not self.update_weights and not args.debug_rollout_only:
                diagnostics.warn(
                    args,
                    f"model {self.name} is {self.model_path}, not --hf-checkpoint {args.hf_checkpoint}: its weights "
                    "stay as they are; set update_weights to send it the trainer's",
                )
        for group in self.server_groups:
            group.overrides.setdefault("model_path", self.model_path)
            if group.num_gpus_per_engine is None:
                group.num_gpus_per_engine = self.num_gpus_per_engine or args.rollout_num_gpus_per_engine
            if group.worker_type != "placeholder" and group.num_gpus % group.num_gpus_per_engine != 0:
                raise ArgumentError(
                    f"model {self.name}: {group.num_gpus} slots of its {group.worker_type} engines are no multiple of "
                    f"{group.num_gpus_per_engine} per engine (num_gpus_per_engine, --rollout-num-gpus-per-engine)"
                )
        self._check_kinds(args)
        return self

    def _one_path(self, args: Args) -> str:
        own = self.model_path or args.hf_checkpoint
        paths = sorted({str(group.overrides.get("model_path", own)) for group in self.server_groups} or {str(own)})
        if not all(_is_same(path, paths[0]) for path in paths):
            raise ArgumentError(
                f"model {self.name}: its groups serve different models ({', '.join(paths)}); one router serves one "
                "model, so list the others as models of their own"
            )
        return paths[0]

    def _check_kinds(self, args: Args) -> None:
        kinds = {group.worker_type for group in self.server_groups}
        for one, other in (("prefill", "decode"), ("decode", "prefill")):
            if one in kinds and other not in kinds:
                raise ArgumentError(f"model {self.name} has {one} engines and no {other} engines; it needs both")
        if kinds - {"placeholder"} == {"encoder"}:
            raise ArgumentError(f"model {self.name} has only encoder engines, which generate nothing; add regular ones")
        if "regular" in kinds and self.has_pd_disaggregation:
            diagnostics.warn(
                args,
                f"model {self.name} has regular engines beside prefill and decode engines: its router sends requests "
                "to the latter only",
            )


def _is_same(one: str, other: str | None) -> bool:
    """Return True if two paths, which need not exist, are of the same checkpoint."""
    return os.path.realpath(one) == os.path.realpath(str(other))


class SglangConfig(FileModel):
    """Every model a run serves."""

    models: list[ModelConfig]

    @classmethod
    def from_yaml(cls, path: str) -> SglangConfig:
        """The models of the file ``path``. Raises ``ArgumentError`` for all mistakes at once."""
        return read(path)[0]

    @classmethod
    def from_prefill_num_servers(cls, args: Args) -> SglangConfig:
        """``--prefill-num-servers N``: N prefill engines, and decode engines on the other slots."""
        size = args.rollout_num_gpus_per_engine
        prefill = (args.prefill_num_servers or 0) * size
        decode = (args.rollout_num_gpus or 0) - prefill
        if decode <= 0:
            raise ArgumentError(
                f"--prefill-num-servers {args.prefill_num_servers} x --rollout-num-gpus-per-engine {size} = {prefill} "
                f"slots leave none of --rollout-num-gpus {args.rollout_num_gpus} to decode; lower it or add slots"
            )
        groups = [
            ServerGroupConfig(worker_type="prefill", num_gpus=prefill),
            ServerGroupConfig(worker_type="decode", num_gpus=decode),
        ]
        return cls(models=[ModelConfig(name="default", server_groups=groups)])

    @property
    def has_pd_disaggregation(self) -> bool:
        """True if some model computes prompts and responses on different engines."""
        return any(model.has_pd_disaggregation for model in self.models)

    @property
    def total_num_gpus(self) -> int:
        """Slots of all models, placeholders included."""
        return sum(model.total_num_gpus for model in self.models)

    @property
    def num_engines(self) -> int:
        """Engines of all models."""
        return sum(group.num_engines for model in self.models for group in model.server_groups)


class SglangFile(FileModel):
    """The file."""

    sglang: list[ModelConfig] = Field(min_length=1, description="the models, the actor first")


def read(path: str) -> tuple[SglangConfig, list[str]]:
    """The models of the file ``path``, and warnings. Raises ``ArgumentError`` for all mistakes at once."""
    document = read_yaml(path, OPTION)
    warnings = check_overrides(document)
    found = validate(document, SglangFile)
    models = found.sglang if found is not None else []
    check_unique(document, [(("sglang", place, "name"), model.name) for place, model in enumerate(models)])
    document.check()
    return SglangConfig(models=models), warnings


def deployment(args: Args) -> SglangConfig:
    """The models and engines that a run with ``args`` starts, with every value filled in.

    ``--sglang-config``, else ``--prefill-num-servers``, else one model ``default`` with regular engines on all slots;
    that model has no groups where no engine is started (no slots, engines elsewhere, training alone). Raises
    ``ArgumentError``.
    """
    config = _chosen(args)
    try:
        for model in config.models:
            model.resolve(args)
    except ArgumentError as error:
        if args.sglang_config is None:
            raise
        raise ArgumentError(f"{OPTION} {args.sglang_config}: {error}") from error
    counts = args.sglang_config is not None and not args.debug_train_only
    if counts and config.total_num_gpus != (args.rollout_num_gpus or 0):
        counted = " + ".join(f"{model.name} {model.total_num_gpus}" for model in config.models)
        raise ArgumentError(
            f"{OPTION} {args.sglang_config}: {counted} = {config.total_num_gpus} slots, but --rollout-num-gpus is "
            f"{args.rollout_num_gpus}; make them equal (a group with worker_type placeholder keeps slots free)"
        )
    return config


def _chosen(args: Args) -> SglangConfig:
    if args.sglang_config is not None:
        config, warnings = read(args.sglang_config)
        for warning in warnings:
            diagnostics.warn(args, warning)
        if not args.debug_train_only:
            return config
    elsewhere = args.rollout_external_engine_addrs is not None
    slots = 0 if args.debug_train_only or elsewhere else args.rollout_num_gpus
    if args.prefill_num_servers is not None and slots != 0:
        return SglangConfig.from_prefill_num_servers(args)
    groups = [ServerGroupConfig(num_gpus=slots)] if slots else []
    return SglangConfig(models=[ModelConfig(name="default", server_groups=groups)])


def check_overrides(document: Document) -> list[str]:
    """Type the overrides in ``document.data`` and note values of the wrong type.

    Returns a warning for every key that SGLang does not have: engines of another version might.
    """
    known = {record["dest"]: record for record in catalog.records(catalog.SGLANG)}
    warnings = []
    for at, overrides in _all_overrides(document):
        for name in list(overrides):
            place = (*at, name)
            record = known.get(str(name).replace("-", "_"))
            flag = None if record is None else flag_of_record(record, prefix="", source="sglang", group="")
            if flag is None:
                renamed = of_older_flag(document, place, prefix="sglang-")
                if renamed is None:
                    warnings.append(_unknown(document, place, list(known)))
                else:
                    del overrides[name]
                    fields = {dest.removeprefix("sglang_"): value for dest, value in renamed.items()}
                    overrides.update({**fields, **overrides})
            elif _is_checked(flag, overrides[name]):
                try:
                    overrides[name] = typed(flag, document, place)
                except ValueError as error:
                    document.note(place, str(error))
    return [*document.warnings, *warnings]


def _is_checked(flag: Flag, value: object) -> bool:
    """Only where the command line and the field of SGLang's dataclass agree: it also takes null, mappings and lists."""
    checked = flag.action in ("true", "false", "tristate") or flag.kind in ("int", "float", "human_int")
    return checked and value is not None and not isinstance(value, dict | list)


def _all_overrides(document: Document) -> Iterator[tuple[KeyPath, dict[str, object]]]:
    models = document.data.get("sglang")
    for i, model in enumerate(models if isinstance(models, list) else []):
        for key in ("server_groups", "engine_groups"):
            groups = model.get(key) if isinstance(model, dict) else None
            for j, group in enumerate(groups if isinstance(groups, list) else []):
                overrides = group.get("overrides") if isinstance(group, dict) else None
                if isinstance(overrides, dict):
                    yield ("sglang", i, key, j, "overrides"), overrides


def _unknown(document: Document, at: KeyPath, known: list[str]) -> str:
    name = str(at[-1])
    guess = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    meant = f"; did you mean {guess[0]}?" if guess else ""
    version = catalog.installed_version(catalog.SGLANG) or catalog.SGLANG.pinned
    return (
        f"{document.option} {document.path}, line {document.line(at)}: sglang {version} has no argument {name}, and "
        f"engines do without it{meant}"
    )
