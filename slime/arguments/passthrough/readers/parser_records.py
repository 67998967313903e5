"""Turn the actions of an ``argparse`` parser into JSON records (used by the readers, in the helper process)."""

from __future__ import annotations

import argparse
import enum
from collections.abc import Callable
from typing import Any

KINDS = {
    "str": "str",
    "int": "int",
    "float": "float",
    "loads": "json",
    "json_list_type": "json",
    "human_readable_int": "human_int",
    "nullable_str": "nullable_str",
}


def records(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """One record per action: options, dest, default, kind, action, nargs, const, choices, help, title of its group."""
    titles = {id(a): g.title or "" for g in parser._action_groups for a in g._group_actions}
    actions = [a for a in parser._actions if a.option_strings and not isinstance(a, argparse._HelpAction)]
    return [_record(a, titles.get(id(a), "")) for a in actions]


def _record(action: argparse.Action, title: str) -> dict[str, Any]:
    form = _form(action)
    help_text = "" if action.help in (None, argparse.SUPPRESS) else str(action.help)
    return {
        "options": list(action.option_strings),
        "dest": action.dest,
        "default": _plain(action.default),
        "kind": _kind(action),
        "action": form,
        "nargs": None if form in ("true", "false", "tristate") else action.nargs,
        "const": _plain(action.const) if action.nargs == "?" else None,
        # Some choices come from sets, whose order differs from process to process.
        "choices": None if action.choices is None else sorted(map(_plain, action.choices), key=str),
        "help": " ".join(help_text.replace("%(default)s", str(action.default)).replace("%%", "%").split()),
        "title": "" if title in ("options", "optional arguments") else title,
        "class": type(action).__name__,
    }


def _form(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        return "tristate"
    if action.nargs == 0:
        return "false" if getattr(action, "const", True) is False else "true"
    return "append" if isinstance(action, argparse._AppendAction) else "value"


def _kind(action: argparse.Action) -> str:
    name = getattr(action.type, "__name__", "str")
    if name in KINDS:
        return KINDS[name]
    if any(isinstance(choice, enum.Enum) for choice in action.choices or ()):
        return "str"
    return _kind_of_converter(action.type) if callable(action.type) else "str"


def _kind_of_converter(convert: Callable[[str], Any]) -> str:
    """What a package's own converter makes of numbers and lists; text when it makes neither of them."""

    def result(text: str) -> Any:
        try:
            return convert(text)
        except Exception:  # noqa: BLE001  (a converter may refuse in any way)
            return None

    number, pattern = result("3"), result("([1]*2+[0])")
    if pattern in ([1, 1, 0], (1, 1, 0)) or result("1,0") in ([1, 0], (1, 0)):
        return "layout"
    if type(number) is int:
        return "int"
    return "float" if type(number) is float else "str"


def _plain(value: Any) -> Any:
    """``value`` as JSON has it: members of enumerations by name, what JSON cannot say as None."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else None
