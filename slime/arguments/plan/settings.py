"""What was given on the command line, and what was derived from it."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.arguments.command_line import all_flags
from slime.arguments.flag import Flag
from slime.arguments.plan.words import labelled
from slime.utils.secrets import MASK, is_secret

WITHOUT_FLAG = ("world_size", "data_parallel_size", "rollout_num_engines", "sglang_tp_size", "use_critic")
HIDDEN = frozenset({"dry_run", "config", "dump_config"})
NO_BREAK = "\u00a0"


def given_lines(args: Namespace) -> list[str]:
    """The flags that were given, by group, with their resolved values."""
    groups: dict[str, list[str]] = {}
    for flag in all_flags():
        if flag.dest in args.explicit_flags - HIDDEN and hasattr(args, flag.dest):
            groups.setdefault(flag.group, []).append(_words(flag, getattr(args, flag.dest)))
    return _wrapped(list(groups.items()))


def derived_lines(args: Namespace) -> list[str]:
    """The flags whose value differs from the default without having been given, and the sizes that have no flag."""
    groups: dict[str, list[str]] = {}
    known = {flag.dest: flag for flag in all_flags()}
    for flag in known.values():
        value = getattr(args, flag.dest, flag.default)
        if flag.dest not in args.explicit_flags and value != flag.default:
            groups.setdefault(flag.group, []).append(_words(flag, value))
    others = [
        f"{name}={_shown(name, getattr(args, name))}" for name in WITHOUT_FLAG if getattr(args, name, None) is not None
    ]
    return _wrapped([*groups.items(), ("without a flag", others)])


def _wrapped(groups: list[tuple[str, list[str]]]) -> list[str]:
    rows = [(group, "  ".join(words).replace("  ", " ")) for group, words in groups if words]
    return [line.replace(NO_BREAK, " ").rstrip() for line in labelled(rows)]


def _words(flag: Flag, value: Any) -> str:
    """The flag as it would be typed; a value and its flag stay on one line."""
    if flag.action in ("true", "false"):
        switched = value is (flag.action == "true")
        return flag.option if switched else f"{flag.dest}={value}"
    if flag.action == "tristate" and isinstance(value, bool):
        return flag.options[0] if value else flag.options[-1]
    return f"{flag.option}{NO_BREAK}{_shown(flag.dest, value)}"


def _shown(name: str, value: Any) -> str:
    if value is not None and is_secret(name):
        return MASK
    if isinstance(value, list | tuple) and value and all(isinstance(item, str | int | float) for item in value):
        text = " ".join(map(str, value))
    else:
        text = str(value)
    return text.replace(" ", NO_BREAK)
