"""What was given on the command line, and what was derived from it."""

from __future__ import annotations

from argparse import Namespace
from itertools import groupby
from typing import Any

from slime.arguments.command_line import all_flags
from slime.arguments.flag import Flag
from slime.arguments.plan.words import labelled
from slime.arguments.rules import model_defaults
from slime.utils.secrets import MASK, is_secret

PARALLEL_SIZES = ("world_size", "data_parallel_size")
SETTLED = frozenset({"teacher server", "Megatron: training scripts"})
"""Groups whose derived values are the same in every run."""
HIDDEN = frozenset({"dry_run", "config", "dump_config"})
NO_BREAK = "\u00a0"
LONG = 48


def given_lines(args: Namespace) -> list[str]:
    """The flags that were given, by group, with their resolved values."""
    groups: dict[str, list[str]] = {}
    for flag in all_flags():
        if flag.dest in args.explicit_flags - HIDDEN and hasattr(args, flag.dest):
            groups.setdefault(flag.group, []).append(_words(flag, getattr(args, flag.dest)))
    return _wrapped(list(groups.items()))


def derived_lines(args: Namespace) -> list[str]:
    """The flags whose value differs from the default without having been given, and the trainer's sizes.

    Those of the model that are its configuration's have a section of their own.
    """
    groups: dict[str, list[str]] = {}
    told = model_defaults.taken(args)
    known = {flag.dest: flag for flag in all_flags()}
    for flag in known.values():
        value = getattr(args, flag.dest, flag.default)
        if flag.dest not in {*args.explicit_flags, *told} and value != flag.default and flag.group not in SETTLED:
            groups.setdefault(flag.group, []).append(_words(flag, value))
    sizes = [] if args.debug_rollout_only else [f"{name}={getattr(args, name)}" for name in PARALLEL_SIZES]
    return _wrapped([*groups.items(), ("parallel sizes", sizes)])


def _wrapped(groups: list[tuple[str, list[str]]]) -> list[str]:
    rows = [(group, "  ".join(words).replace("  ", " ")) for group, words in groups if words]
    return [line.replace(NO_BREAK, " ").rstrip() for line in labelled(rows)]


def _words(flag: Flag, value: Any) -> str:
    """The flag as it would be typed; a short value and its flag stay on one line."""
    if flag.action in ("true", "false"):
        switched = value is (flag.action == "true")
        return flag.option if switched else f"{flag.dest}={value}"
    if flag.action == "tristate" and isinstance(value, bool):
        return flag.options[0] if value else flag.options[-1]
    text = _shown(flag.dest, value)
    return f"{flag.option}{NO_BREAK if len(text) < LONG else ' '}{text}"


def _shown(name: str, value: Any) -> str:
    if value is not None and is_secret(name):
        return MASK
    if isinstance(value, list | tuple) and len(value) > 8:
        return "+".join(f"[{item}]*{len(list(same))}" for item, same in groupby(value))
    if isinstance(value, list | tuple):
        return NO_BREAK.join(map(str, value)) or "[]"
    return str(value).replace(" ", NO_BREAK)
