"""Flags that Megatron-LM's own training scripts read and slime does not: launch scripts carry them.

They are known, with Megatron-LM's defaults, so that they are answered by name: those that can have no effect here with
a warning, those that would change the training with a refusal. The table is ``megatron_script_flags.tsv``.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from slime.arguments.flag import Flag

SCRIPT = "Megatron: training scripts"
TABLE = Path(__file__).with_suffix(".tsv")
_FORMS: dict[str, dict[str, Any]] = {
    "switch on": {"action": "true"},
    "switch off": {"action": "false"},
    "int": {"kind": "int"},
    "float": {"kind": "float"},
    "text": {},
    "ints": {"kind": "int", "nargs": "*"},
    "texts": {"nargs": "*"},
}


def script_flags() -> list[Flag]:
    """All of them, in the order of the table."""
    return [flag for flag, _ in _table()]


def without_effect() -> dict[str, str]:
    """Attribute of a flag that can have no effect -> why, or what to do instead."""
    return {flag.dest: why for flag, why in _table() if why}


def refused() -> frozenset[str]:
    """Attributes of the flags that would change the training."""
    return frozenset(flag.dest for flag, why in _table() if not why)


@cache
def _table() -> list[tuple[Flag, str]]:
    lines = TABLE.read_text().splitlines()
    return [_row(*line.split("\t")) for line in lines if not line.startswith("#")]


def _row(option: str, dest: str, form: str, default: str, meaning: str, why: str) -> tuple[Flag, str]:
    _, is_choice, choices = form.partition("one of ")
    more: dict[str, Any] = {"choices": tuple(choices.split("|"))} if is_choice else _FORMS[form]
    flag = Flag(dest, (option,), json.loads(default), help=meaning, group=SCRIPT, source="megatron", **more)
    return flag, why
