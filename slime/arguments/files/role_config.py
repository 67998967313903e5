"""Per-role overrides of the arguments (``--megatron-config-path``)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from pydantic import AliasChoices, Field, field_validator

from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.command_line import all_flags
from slime.arguments.errors import ArgumentError
from slime.arguments.files.flag_values import FlagNames, read_flags
from slime.arguments.files.schema import FileModel, validate
from slime.arguments.files.yaml_source import Document, KeyPath, seen
from slime.arguments.files.yaml_source import read as read_yaml

OPTION = "--megatron-config-path"
CRITIC_OPTION = "--critic-overrides"
PLACEMENT_KEYS = frozenset({"num_nodes", "num_gpus_per_node"})
ROLES = ("actor", "critic")
CRITIC_VALUES: dict[str, Any] = {
    "kl_coef": 0,
    "use_opd": False,
    "custom_advantage_function_path": None,
    "untie_embeddings_and_output_weights": True,
}


class RoleEntry(FileModel):
    """Arguments of one role that differ from the run's."""

    name: str = Field(default="default", description="free text")
    role: str = Field(description="actor or critic")
    overrides: dict[str, Any] = Field(
        default_factory=dict,
        validation_alias=AliasChoices("overrides", "args"),
        description="attributes of the arguments and their values for this role",
    )

    @field_validator("overrides", mode="before")
    @classmethod
    def _nothing_is_empty(cls, value: object) -> Any:
        return {} if value is None else value


class RoleConfig(FileModel):
    """The file."""

    megatron: list[RoleEntry] = Field(description="at most one entry per role")


def read_roles(
    path: str, more_roles: Iterable[str] = (), warn: Callable[[str], object] | None = None
) -> dict[str, dict[str, Any]]:
    """Role -> attribute -> value of the file ``path``; values of flags are typed and checked as on the command line.

    ``more_roles`` are accepted beside ``ROLES``; ``warn`` receives the warnings about the file. Raises
    ``ArgumentError`` for all mistakes at once.
    """
    document = read_yaml(path, OPTION)
    config = validate(document, RoleConfig)
    roles = [entry.role for entry in config.megatron] if config is not None else []
    known = (*ROLES, *more_roles)
    for place, role in enumerate(roles):
        if role not in known:
            document.note(("megatron", place, "role"), f"expected one of {', '.join(known)}, got {role!r}")
        elif role in roles[:place]:
            document.note(("megatron", place, "role"), f"role {role} has an entry above already; merge the two")
    entries = document.value(("megatron",))
    overrides = [_overrides(document, place) for place in range(len(entries) if isinstance(entries, list) else 0)]
    document.check()
    if warn is not None:
        for message in document.warnings:
            warn(message)
    return dict(zip(roles, overrides, strict=True))


def overrides_of(args: Args, path: str | None, role: str) -> dict[str, Any]:
    """Attribute -> value for ``role``, of ``--critic-overrides`` and of the YAML file ``path``, which wins."""
    of_file = {} if path is None else read_roles(path, (role,)).get(role, {})
    # plugins bring their own namespaces
    of_flag: dict[str, Any] = getattr(args, "critic_overrides", {}) if role == "critic" else {}
    return {**of_flag, **of_file}


def parse_megatron_role_args(base_args: Args, path: str | None, role: str) -> Args:
    """A copy of ``base_args`` with the overrides that the YAML file ``path`` has for ``role``.

    A role without an entry inherits everything. The critic always gets ``CRITIC_VALUES``, and its parameters keep a CPU
    copy unless overridden. Raises ``ArgumentError``.
    """
    args = copy.deepcopy(base_args)
    overrides = overrides_of(base_args, path, role)
    where = f"{OPTION} {path}, role {role}" if path is not None else CRITIC_OPTION
    for name, value in overrides.items():
        if name in PLACEMENT_KEYS:
            message = f"{where}: {name} of role {role} is ignored; roles share the actor's placement"
            diagnostics.warn(base_args, message)
            continue
        if not hasattr(args, name):
            diagnostics.warn(base_args, f"{where}: {name}: {_flag_names().unknown(name)}")
        existing = getattr(args, name, None)
        setattr(args, name, _like(existing, value, f"{where}: {name}"))
    _derive_again(args, overrides)
    if role == "critic":
        for name, value in CRITIC_VALUES.items():
            setattr(args, name, value)
        if "disable_param_buffers_cpu_backup" not in overrides:
            args.disable_param_buffers_cpu_backup = False
    return args


def _derive_again(args: Args, overrides: dict[str, Any]) -> None:
    """Let values follow those of the role that they follow on the command line, unless they were given."""
    given = {*overrides, *getattr(args, "explicit_flags", ())}
    if "weight_decay" in overrides:
        for name in {"start_weight_decay", "end_weight_decay"} - given:
            setattr(args, name, args.weight_decay)
    if ("eps_clip" in overrides and "eps_clip_high" not in given) or overrides.get("eps_clip_high", 0) is None:
        args.eps_clip_high = args.eps_clip
    if "recompute_activations" in overrides and "recompute_granularity" not in given:
        args.recompute_granularity = "selective" if args.recompute_activations else None


def _overrides(document: Document, place: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in ("overrides", "args"):
        at: KeyPath = ("megatron", place, key)
        if isinstance(document.value(at), dict):
            of_flags, others = read_flags(document, at, _flag_names())
            found |= of_flags | {name.replace("-", "_"): document.value(where) for name, where in others.items()}
    return found


@cache
def _flag_names() -> FlagNames:
    return FlagNames.of(all_flags())


def _like(existing: object, value: object, where: str) -> Any:
    """``value`` with the type of the number it replaces: attributes of plug-ins have no flag that types them."""
    if not isinstance(value, str) or isinstance(existing, bool) or not isinstance(existing, int | float):
        return value
    try:
        return type(existing)(value)
    except ValueError as error:
        raise ArgumentError(f"{where}: expected {type(existing).__name__}, got {seen(value)}") from error
