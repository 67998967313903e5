"""Flags in a file: names are found and values are typed and checked as on the command line."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError

from slime.arguments.errors import ArgumentError
from slime.arguments.files.schema import message
from slime.arguments.files.yaml_source import Document, KeyPath, seen
from slime.arguments.flag import CONVERTERS, KIND_WORDS, Flag
from slime.arguments.groups import ALL_GROUPS
from slime.arguments.older_flags import older_flags, translate_value
from slime.arguments.passthrough import router, sglang
from slime.arguments.spelling import nearest


@dataclass(frozen=True)
class FlagNames:
    """Finds a flag by its attribute or by one of its options, with dashes or underscores."""

    by_name: dict[str, Flag]
    negative: frozenset[str]
    titles: frozenset[str]

    @classmethod
    def of(cls, flags: Iterable[Flag]) -> FlagNames:
        """The names of ``flags``; an attribute wins over an option of the same spelling."""
        flags = list(flags)
        by_name: dict[str, Flag] = {}
        negative = set()
        for flag in flags:
            for option in flag.options:
                by_name.setdefault(_plain(option), flag)
                says_no = flag.action == "false" or (flag.action == "tristate" and option != flag.option)
                if says_no and _plain(option) != flag.dest:
                    negative.add(_plain(option))
        attributes = {flag.dest: flag for flag in flags}
        titles = frozenset(flag.group for flag in flags)
        return cls({**by_name, **attributes}, frozenset(negative - set(attributes)), titles)

    def find(self, name: str) -> Flag | None:
        """The flag called ``name``, or None."""
        return self.by_name.get(_plain(name))

    def is_negative(self, name: str) -> bool:
        """Return True if ``name`` is an option that switches its attribute off."""
        return _plain(name) in self.negative

    def unknown(self, name: str) -> str:
        """The message about a name that belongs to no flag."""
        if name in self.titles:
            return "this is the title of a group; write the flags below it without the title and the indentation"
        owned = {**sglang.owned_options(), **router.owned_options()}
        option = "--" + _plain(name).replace("_", "-")
        if option in owned:
            return f"it is set by slime itself: {owned[option]}"
        guess = nearest(option.lower(), ["--" + known.replace("_", "-") for known in self.by_name])
        return f"no flag has this name; did you mean {_plain(guess)}?" if guess else "no flag has this name"


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def read_flags(document: Document, at: KeyPath, names: FlagNames) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """The typed values of the flags in the mapping at ``at`` by attribute, and the keys that belong to no flag.

    Mistakes are noted in ``document``; a value with one is left out.
    """
    found: dict[str, Any] = {}
    places: dict[str, KeyPath] = {}
    others: dict[str, KeyPath] = {}
    for name in document.value(at) or {}:
        place: KeyPath = (*at, name)
        if not isinstance(name, str):
            document.note(place, f"a name must be text; write '{name}' in quotes")
            continue
        flag = names.find(name)
        if flag is None:
            older = of_older_flag(document, place)
            if older is None:
                others[name] = place
            for dest, value in (older or {}).items():
                found[dest] = found.get(dest, value)  # what is given under the current name wins
                places.setdefault(dest, place)
            continue
        if flag.dest in places and names.find(str(places[flag.dest][-1])) is not None:
            line = document.line(places[flag.dest])
            document.note(place, f"the same flag is given on line {line} already; keep one")
            continue
        places[flag.dest] = place
        try:
            value = typed(flag, document, place)
        except ValueError as error:
            document.note(place, str(error))
            continue
        found[flag.dest] = not value if names.is_negative(name) else value
    for dest, below, reason in _group_mistakes(found):
        document.note((*places[dest], *below), reason)
        found.pop(dest, None)
    return found, others


def of_older_flag(document: Document, at: KeyPath, prefix: str = "") -> dict[str, Any] | None:
    """Return what an entry of an older release sets now, by attribute; None where its name is no older flag.

    ``prefix``: what stands before such a name on the command line and not in this file.
    """
    option = "--" + prefix + _plain(str(at[-1])).replace("_", "-")
    if option not in older_flags():
        return None
    try:
        done = translate_value(option, document.value(at), _parser())
    except ArgumentError as error:
        document.note(at, str(error))
        return {}
    if done is None:
        return None
    document.warn(at, done[1])
    return done[0]


@cache
def _parser() -> ArgumentParser:
    from slime.arguments.command_line import all_flags, build_parser

    return build_parser(all_flags())


def typed(flag: Flag, document: Document, at: KeyPath) -> Any:
    """The value at ``at`` with the type of ``flag``. Raises ``ValueError`` that says what was expected."""
    value = document.value(at)
    if flag.action in ("true", "false", "tristate"):
        if isinstance(value, bool) or (value is None and flag.default is None):
            return value
        raise ValueError(f"expected true or false, got {seen(value, document.text(at))}")
    if value is None:
        if flag.default is None or flag.source == "slime":  # what slime's own flags may be, their groups know
            return None
        raise ValueError(f"expected {KIND_WORDS[flag.kind]}, got nothing")
    if flag.nargs in ("+", "*") or isinstance(flag.nargs, int) or flag.action == "append":
        return _typed_list(flag, document, at, value)
    return _chosen(flag, _typed_scalar(flag, value, document.text(at)))


def _typed_list(flag: Flag, document: Document, at: KeyPath, value: object) -> Any:
    if not isinstance(value, list):
        item = _chosen(flag, _typed_scalar(flag, value, document.text(at)))
        return item if flag.collapse else [item]
    if not value and flag.nargs == "+":
        raise ValueError("expected at least one value, got an empty list")
    items = [_chosen(flag, _typed_scalar(flag, v, document.text((*at, i)))) for i, v in enumerate(value)]
    return items[0] if flag.collapse and len(items) == 1 else items


def _typed_scalar(flag: Flag, value: object, text: str | None) -> Any:
    if flag.kind == "json" and isinstance(value, dict | list):
        return value
    if flag.kind == "layout" and isinstance(value, list):
        text = str(value)
    try:
        if text is None:
            raise ValueError
        return CONVERTERS[flag.kind](text)
    except ValueError:
        if flag.kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if flag.kind in ("int", "human_int", "layout") and type(value) is int:
            return value
        raise ValueError(f"expected {KIND_WORDS[flag.kind]}, got {seen(value, text)}") from None


def _chosen(flag: Flag, value: object) -> Any:
    if flag.choices is not None and value not in flag.choices:
        raise ValueError(f"expected one of {', '.join(map(str, flag.choices))}, got {seen(value)}")
    return value


def _group_mistakes(values: dict[str, Any]) -> list[tuple[str, KeyPath, str]]:
    """Return what the declarations of flags refuse: the attribute, the place within its value, and the reason."""
    mistakes = []
    for group in ALL_GROUPS:
        try:
            group.model_validate({name: values[name] for name in group.model_fields if name in values})
        except ValidationError as error:
            mistakes += [(str(detail["loc"][0]), detail["loc"][1:], message(detail)) for detail in error.errors()]
    return mistakes
