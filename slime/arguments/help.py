"""``--help``: grouped, with defaults; ``--help WORD`` filters, ``--help all`` shows everything."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from slime.arguments.availability import INERT, is_available, refused_values
from slime.arguments.flag import KIND_WORDS, Flag

OPENING = """usage: train.py FLAGS
       train_async.py FLAGS

Reinforcement learning of language models: Megatron trains, SGLang generates, Ray places.
  --help WORD   flags whose name, group or description contains WORD (also Megatron's, SGLang's and the router's)
  --help all    every flag"""
PASSED = {
    "megatron": ("Megatron", "flags of megatron-core, spelled as Megatron-LM spells them", "megatron"),
    "sglang": ("SGLang", "flags of the SGLang server with the prefix --sglang-", "sglang"),
    "router": ("router", "flags of sglang-router, --router-*", "router"),
}


def form(flag: Flag) -> str:
    """How the flag is written: ``--x N``, ``--x {a,b}``, ``--x / --no-x``."""
    if flag.action == "tristate":
        return " / ".join(flag.options)
    if flag.action in ("true", "false"):
        return ", ".join(flag.options)
    word = {"int": "N", "human_int": "N", "float": "X", "json": "JSON", "layout": "N|LIST"}.get(flag.kind, "TEXT")
    if flag.choices:
        word = "{" + ",".join(map(str, flag.choices)) + "}"
    if flag.nargs in ("+", "*"):
        word += " ..."
    return f"{', '.join(flag.options)} {word}"


def default_text(flag: Flag) -> str:
    """What happens without the flag, in words; empty when the description says it."""
    if flag.required:
        return "required"
    if flag.action in ("true", "false"):
        return f"sets {flag.dest} to {flag.action == 'true'}" if flag.action == "false" else ""
    if flag.default is None or flag.default in ([], {}):
        return ""
    value = flag.default if isinstance(flag.default, str) else json.dumps(flag.default, default=str)
    return f"default: {value}"


def custom_flags(parser: argparse.ArgumentParser, flags: Sequence[Flag]) -> list[Flag]:
    """A user's own ``add_argument`` calls as flags, for the help."""
    known = {option for flag in flags for option in flag.options}
    defaults: dict[str, Any] = getattr(parser, "custom_defaults", {})
    return [
        Flag(
            dest=action.dest,
            options=tuple(action.option_strings),
            default=defaults.get(action.dest),
            action="true" if action.nargs == 0 else "value",
            help="" if action.help in (None, argparse.SUPPRESS) else str(action.help),
            group="added by add_custom_arguments",
        )
        for action in parser._actions
        if action.option_strings and not known.intersection(action.option_strings)
    ]


def help_text(flags: Sequence[Flag], topic: str | None = None, width: int | None = None) -> str:
    """The text of ``--help`` (``topic`` None), of ``--help all`` or of ``--help WORD``."""
    width = width or max(shutil.get_terminal_size((110, 24)).columns, 60)
    if topic is None:
        shown = [flag for flag in flags if flag.source == "slime"]
        lines = [OPENING, *_sections(shown, width), "", "flags passed on to installed packages:"]
        for source, (_, words, key) in PASSED.items():
            count = sum(flag.source == source for flag in flags)
            lines.append(f"  {count:4d} {words}: --help {key}")
        return "\n".join(lines)
    shown = list(flags) if topic == "all" else _mentioning(flags, topic)
    if not shown:
        return f"no flag mentions {topic!r}"
    return "\n".join([f"{len(shown)} flags", *_sections(shown, width)])


def _mentioning(flags: Sequence[Flag], topic: str) -> list[Flag]:
    """Flags with a word that starts with ``topic``; without any, those that contain it anywhere."""
    word = re.escape(topic.lower().lstrip("-").replace("_", "-"))

    def matching(pattern: str) -> list[Flag]:
        return [flag for flag in flags if re.search(pattern, _searched(flag))]

    return matching(r"\b" + word) or matching(word)


def _searched(flag: Flag) -> str:
    text = " ".join((*flag.options, flag.dest, flag.help, flag.group, flag.source))
    return text.lower().replace("_", "-")


def _sections(flags: Sequence[Flag], width: int) -> list[str]:
    groups: dict[str, list[Flag]] = {}
    for flag in flags:
        groups.setdefault(flag.group, []).append(flag)
    lines = []
    for title, members in groups.items():
        lines += ["", f"{title}:"]
        for flag in members:
            lines += _entry(flag, width)
    return lines


def _entry(flag: Flag, width: int) -> list[str]:
    notes = [default_text(flag)]
    if flag.dest in INERT:
        notes.append("without effect")
    elif not is_available(flag):
        notes.append("not available yet")
    elif refused_values(flag):
        notes.append(f"not available yet: {', '.join(map(str, refused_values(flag)))}")
    noted = "; ".join(note for note in notes if note)
    text = " ".join(part for part in (flag.help, f"({noted})" if noted else "") if part)
    if flag.kind == "layout":
        text += f" [{KIND_WORDS['layout']}]"
    return [f"  {form(flag)}", *textwrap.wrap(text, width - 8, initial_indent=" " * 6, subsequent_indent=" " * 6)]
