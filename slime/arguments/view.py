"""The resolved configuration as data and as YAML."""

from __future__ import annotations

from typing import Any

from slime.arguments.args import Args
from slime.arguments.command_line import all_flags
from slime.arguments.diagnostics import FINDINGS
from slime.utils.plain import plain


def dump(args: Args) -> dict[str, dict[str, Any]]:
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
            found.setdefault(flag.group, {})[flag.dest] = plain(flag.dest, value)
    others = sorted(vars(args).keys() - seen - set(FINDINGS))
    derived = {name: plain(name, getattr(args, name)) for name in others}
    return {**found, "derived": derived}


def to_yaml(args: Args) -> str:
    """``dump`` as YAML text."""
    from slime.arguments.files import yaml_source

    return yaml_source.dump(dump(args))
