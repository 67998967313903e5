"""The resolved configuration as data and as YAML."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.arguments.command_line import all_flags
from slime.utils.secrets import MASK, is_secret


def dump(args: Namespace) -> dict[str, dict[str, Any]]:
    """``group -> attribute -> value``: plain data, secrets masked, derived attributes under ``derived``.

    Of Megatron, SGLang and the router only what differs from the default is listed.
    """
    found: dict[str, dict[str, Any]] = {}
    seen = set()
    for flag in all_flags():
        seen.add(flag.dest)
        if not hasattr(args, flag.dest):
            continue
        value = getattr(args, flag.dest)
        if flag.source == "slime" or value != flag.default:
            found.setdefault(flag.group, {})[flag.dest] = _plain(flag.dest, value)
    derived = {name: _plain(name, value) for name, value in sorted(vars(args).items()) if name not in seen}
    return {**found, "derived": derived}


def to_yaml(args: Namespace) -> str:
    """``dump`` as YAML text."""
    import yaml

    return yaml.safe_dump(dump(args), sort_keys=False, allow_unicode=True, default_flow_style=False)


def _plain(name: str, value: Any) -> Any:
    if value is not None and is_secret(name) and isinstance(value, str | list):
        return MASK
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(str(k), v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain("", v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted(_plain("", v) for v in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value) if isinstance(value, Path) else repr(value)
