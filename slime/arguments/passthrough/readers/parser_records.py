"""Turn the actions of an ``argparse`` parser into JSON records (used by the readers, in the helper process)."""

from __future__ import annotations

import argparse
from typing import Any

KINDS = {
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
    return [_record(a, titles.get(id(a), "")) for a in parser._actions if a.option_strings]


def _record(action: argparse.Action, title: str) -> dict[str, Any]:
    name = type(action).__name__
    if isinstance(action, argparse.BooleanOptionalAction):
        form = "tristate"
    elif action.nargs == 0:
        form = "false" if getattr(action, "const", True) is False else "true"
    elif isinstance(action, argparse._AppendAction):
        form = "append"
    else:
        form = "value"
    help_text = "" if action.help in (None, argparse.SUPPRESS) else str(action.help)
    return {
        "options": list(action.option_strings),
        "dest": action.dest,
        "default": action.default,
        "kind": KINDS.get(getattr(action.type, "__name__", "str"), "str"),
        "action": form,
        "nargs": None if form in ("true", "false", "tristate") else action.nargs,
        "const": action.const if action.nargs == "?" else None,
        # Some choices come from sets, whose order differs from process to process.
        "choices": None if action.choices is None else sorted(action.choices, key=str),
        "help": " ".join(help_text.replace("%(default)s", str(action.default)).replace("%%", "%").split()),
        "title": "" if title in ("options", "optional arguments") else title,
        "class": name,
    }
