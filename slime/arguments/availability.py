"""The flags that are declared but whose feature this version does not have yet, and those that can have no effect.

Their traits say so (``not_yet``, ``inert``), and ``not_yet.toml`` why, and what takes their place. A run that sets one
to anything but its default is refused; ``--dry-run`` lists what would be. Flags of slime <= 0.3.1 and of Megatron that
can have no effect warn and say why.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from slime.arguments.flag import Flag
from slime.arguments.passthrough.megatron import UNREAD

# Variables of trainers that switched on a feature of the patched packages of slime <= 0.3.1, by name or pattern.
NOT_YET_VARIABLES: tuple[str, ...] = (
    "DSA_KV_FP8_QAT",
    "MEGATRON_USE_SGLANG_*",
)


@dataclass(frozen=True)
class Reason:
    """An entry of ``not_yet.toml``: the reason of some flags, by patterns of options, and what to do instead."""

    name: str
    why: str
    instead: str
    flags: tuple[str, ...]


@cache
def reasons() -> tuple[Reason, ...]:
    """Return the entries in their order."""
    entries = tomllib.loads(Path(__file__).with_name("not_yet.toml").read_text())["reason"]
    return tuple(Reason(**{**entry, "flags": tuple(entry["flags"])}) for entry in entries)


def reason_of(flag: Flag) -> Reason | None:
    """Return why a flag is not available; None for one that only another version of Megatron has."""
    return next((one for one in reasons() if any(fnmatchcase(flag.option, pattern) for pattern in one.flags)), None)


def is_available(flag: Flag) -> bool:
    """Return True if some value other than the default may be given."""
    return flag.group != UNREAD and not flag.traits.inert and flag.traits.not_yet is not True


def refused_values(flag: Flag) -> tuple[Any, ...]:
    """Choices of an available flag that this version does not have yet."""
    entry = flag.traits.not_yet
    return entry if isinstance(entry, tuple) else ()


def unavailable_messages(values: dict[str, Any], flags: Iterable[Flag]) -> list[str]:
    """One sentence for every given value (attribute -> value) whose feature does not exist yet."""
    messages = []
    variables = values.get("train_env_vars")
    if isinstance(variables, dict):  # otherwise the flag's own check refuses it
        messages += [
            f"--train-env-vars {name} is not available yet in this version; leave it out"
            for name, value in variables.items()
            if value != "0" and any(fnmatchcase(str(name), pattern) for pattern in NOT_YET_VARIABLES)
        ]
    for flag in _changed(values, flags):
        value = values[flag.dest]
        if flag.traits.inert:
            continue
        if not is_available(flag):
            reason = reason_of(flag)
            instead = "leave it out" if reason is None else reason.instead
            messages.append(f"{flag.option} is not available yet in this version; {instead}")
        elif value in refused_values(flag):
            others = [c for c in flag.choices or () if c not in refused_values(flag)]
            way_out = f"use {' or '.join(map(str, others))}" if others else "leave it out"
            messages.append(f"{flag.option} {value} is not available yet in this version; {way_out}")
    return messages


def inert_messages(values: dict[str, Any], flags: Iterable[Flag]) -> list[str]:
    """One sentence for every given value (attribute -> value) that can have no effect."""
    return [
        f"{flag.option} has no effect: {flag.traits.inert}" for flag in _changed(values, flags) if flag.traits.inert
    ]


def _changed(values: dict[str, Any], flags: Iterable[Flag]) -> list[Flag]:
    return [flag for flag in flags if flag.dest in values and values[flag.dest] != flag.default]
