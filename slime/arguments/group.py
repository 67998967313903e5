"""Declaring flags: a group is a pydantic model, a field is a flag.

    class Cluster(ArgumentGroup):
        title = "cluster"
        actor_num_nodes: int = flag(1, "training nodes", ge=1)

The field name is the namespace attribute. The spelling, the switch or value form and the choices follow from the
annotation: ``bool`` is a switch, ``bool | None`` the pair ``--x`` / ``--no-x``, ``Literal`` a choice, ``list[T]`` takes
several values, ``dict`` takes JSON.
"""

from __future__ import annotations

import re
import types
import typing
from dataclasses import fields, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from slime.arguments.flag import Flag
from slime.arguments.traits import Traits

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_TRAITS = frozenset(field.name for field in fields(Traits))


class ArgumentGroup(BaseModel):
    """Base of every group. Values are checked against the annotations; assignment of unknown names is an error.

    ``read_by``: who reads those of its flags that do not declare it themselves.
    """

    # deferred: help and typos need the declarations alone
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), defer_build=True)
    title: ClassVar[str] = ""
    read_by: ClassVar[Literal["trainers", "run"]] = "trainers"


def _dotted_path(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", text) or text.endswith(".py"):
        raise ValueError("expected a dotted path like package.module.function")
    return text


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"expected a regular expression: {error}") from error
    return text


DottedPath = Annotated[str, AfterValidator(_dotted_path)]
"""``package.module.attribute``; whether it can be imported is found out where it is used."""
Pattern = Annotated[str, AfterValidator(_pattern)]
"""A regular expression."""


def flag(
    default: object,
    description: str,
    *,
    option: str | None = None,
    repeat: bool = False,
    nargs: str | None = None,
    required: bool = False,
    **declared: Any,
) -> Any:
    """Declare one flag. ``option`` overrides the spelling (needed for switches that are on by default); ``repeat``
    collects repeated uses of a list flag; ``required`` flags have no default; ``declared`` are fields of ``Traits``
    and pydantic's constraints (``gt``, ``ge``, ...)."""
    traits = Traits(**{name: declared[name] for name in declared if name in _TRAITS})
    constraints = {name: limit for name, limit in declared.items() if name not in _TRAITS}
    extra: dict[str, Any] = {
        "option": option, "repeat": repeat, "nargs": nargs, "required": required, "traits": traits,
    }  # fmt: skip
    if isinstance(default, list | dict):
        kept = default
        return Field(
            default_factory=lambda: type(kept)(kept), description=description, json_schema_extra=extra, **constraints
        )
    return Field(default=default, description=description, json_schema_extra=extra, **constraints)


def _without_none(annotation: object) -> tuple[Any, bool]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(members) != 1:
            raise TypeError(f"a flag's annotation may have one type and None, not {annotation}")
        return _bare(members[0]), True
    return _bare(annotation), False


def _bare(annotation: object) -> Any:
    """The type below ``Annotated``."""
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation


def _flag_of(name: str, info: FieldInfo, group: type[ArgumentGroup]) -> Flag:
    extra: Any = info.json_schema_extra
    traits: Traits = extra["traits"]
    spelled = extra["option"] or "--" + name.replace("_", "-")
    annotation, optional = _without_none(info.annotation)
    default = info.get_default(call_default_factory=True)
    common: dict[str, Any] = {
        "dest": name, "default": default, "help": info.description or "", "group": group.title,
        "required": extra["required"], "traits": replace(traits, read_by=traits.read_by or group.read_by),
    }  # fmt: skip
    if annotation is bool:
        if optional:
            return Flag(options=(spelled, "--no-" + spelled[2:]), action="tristate", **common)
        return Flag(options=(spelled,), action="false" if default else "true", **common)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        # With nargs "?" the flag alone means the first choice.
        const = args[0] if extra["nargs"] == "?" else None
        return Flag(options=(spelled,), choices=args, nargs=extra["nargs"], const=const, **common)
    if annotation is dict or origin is dict:
        return Flag(options=(spelled,), kind="json", **common)
    if origin is list:
        item, choices = _bare(args[0]), None
        if typing.get_origin(item) is typing.Literal:
            item, choices = str, typing.get_args(item)
        common.update(kind=item.__name__, choices=choices)
        if extra["repeat"]:
            return Flag(options=(spelled,), action="append", **common)
        return Flag(options=(spelled,), nargs=extra["nargs"] or "+", **common)
    return Flag(options=(spelled,), kind=annotation.__name__, **common)


@cache
def flags_of(group: type[ArgumentGroup]) -> tuple[Flag, ...]:
    """The flags a group declares, in order of declaration."""
    return tuple(_flag_of(name, info, group) for name, info in group.model_fields.items())


_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def validation_reason(detail: ErrorDetails) -> str:
    """Return what was expected and what was seen, from one of pydantic's error records."""
    kind, seen = detail["type"], detail["input"]
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"expected {words} {detail['ctx'][bound]:g}, got {seen}"
    if kind == "dict_type":
        return f'expected a JSON object like {{"name": "value"}}, got {seen!r}'
    if kind == "string_type" and len(detail["loc"]) > 1:
        return f"the value of {detail['loc'][1]!r} must be text in quotes, got {seen!r}"
    reason = str(detail["msg"]).removeprefix("Value error, ")
    return f"{reason[0].lower()}{reason[1:]}, got {seen!r}"
