"""Checks a file against a pydantic model; every mistake is noted with its line and what would be right."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, ValidationError

from slime.arguments.files.yaml_source import Document, KeyPath, seen

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class FileModel(BaseModel):
    """Base of every mapping in a file: unknown keys are mistakes, numbers may stand where text is expected."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True, protected_namespaces=(), defer_build=True)


Model = TypeVar("Model", bound=FileModel)


def _no_switch(value: object) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


Count = Annotated[int, BeforeValidator(_no_switch)]
"""An integer; true and false are none."""
Number = Annotated[float, BeforeValidator(_no_switch)]
"""A number; true and false are none."""


def validate(document: Document, model: type[Model], at: KeyPath = ()) -> Model | None:
    """The mapping at ``at`` as ``model``, or None after its mistakes were noted in ``document``."""
    try:
        return model.model_validate(document.value(at) if at else document.data)
    except ValidationError as error:
        for detail in error.errors():
            place = (*at, *detail["loc"])
            document.note(place, message(detail, document.text(place), keys_at(model, detail["loc"][:-1])))
        return None


_EXPECTED = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "dict": "a mapping (`name: value` lines)",
    "model": "a mapping (`name: value` lines)",
}


def message(detail: ErrorDetails, text: str | None = None, known: Iterable[str] = ()) -> str:
    """Return the mistake in one of pydantic's error records; ``text`` is the value as written, ``known`` the keys."""
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return unknown_key(str(detail["loc"][-1]), known)
    if kind == "missing":
        return "is missing"
    if kind == "invalid_key":
        return f"a key must be text; write '{detail['loc'][-1]}' in quotes"
    if kind == "literal_error":
        choices = str(detail["ctx"]["expected"]).replace("'", "")
        return f"expected one of {choices}, got {seen(value, text)}"
    if kind == "value_error":
        reason = str(detail["ctx"]["error"])
    elif kind in ("too_short", "string_too_short"):
        reason = "expected at least one entry" if kind == "too_short" else "expected a text that is not empty"
    elif (expected := _EXPECTED.get(kind.split("_")[0])) is not None:
        reason = f"expected {expected}"
    else:
        reason = "expected a value" + detail["msg"].removeprefix("Input should be")
    return f"{reason}, got {seen(value, text)}{_hint(kind, value)}"


def _hint(kind: str, value: object) -> str:
    if kind == "string_type" and isinstance(value, bool):
        return "; write it in quotes"
    return "; start every entry with a dash: `- `" if kind == "list_type" and isinstance(value, dict) else ""


def check_unique(document: Document, names: Iterable[tuple[KeyPath, str]]) -> None:
    """Note every name (with its place) that stands in the file twice."""
    lines: dict[str, int] = {}
    for at, name in names:
        if name in lines:
            document.note(at, f"names must be unique, and {name} is on line {lines[name]} already")
        lines.setdefault(name, document.line(at))


def unknown_key(name: str, known: Iterable[str]) -> str:
    """The message about an unknown key."""
    known = sorted(known)
    if name in known:
        return "the same is given under its other name; keep one"
    plain = name.strip().lower().replace("-", "_")
    guess = [plain] if plain in known else difflib.get_close_matches(plain, known, n=1)
    return f"unknown key; did you mean {guess[0]}?" if guess else f"unknown key; known are {', '.join(known)}"


def keys_at(model: type[BaseModel], at: KeyPath) -> list[str]:
    """The keys a file may have at ``at`` below ``model``, in every spelling."""
    annotation: Any = model
    for step in at:
        annotation = _inside(annotation, step)
    inner = _bare(annotation)
    if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
        return []
    return [name for field in inner.model_fields for name in spellings(inner, field)]


def spellings(model: type[BaseModel], name: str) -> list[str]:
    """The keys a file may use for the field ``name``, the usual one first."""
    alias = model.model_fields[name].validation_alias
    return [str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else [name]


def _inside(annotation: object, step: str | int) -> Any:
    inner = _bare(annotation)
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        names = [name for name in inner.model_fields if step in spellings(inner, name)]
        return inner.model_fields[names[0]].annotation if names else None
    arguments = typing.get_args(inner)
    return arguments[-1] if arguments else None


def _bare(annotation: object) -> Any:
    """The type below ``Annotated`` and ``| None``."""
    if typing.get_origin(annotation) is Annotated:
        return _bare(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        return _bare(members[0])
    return annotation
