"""``--config`` and ``--dump-config``: the flags of a run in one YAML file."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.arguments.files import custom_config
from slime.arguments.flag import Flag

OWN_FLAGS = frozenset({"config", "dump_config", "dry_run"})


@dataclass(frozen=True)
class RunConfig:
    """A file's contents: attributes that count as given, defaults that replace slime's, and derived attributes."""

    given: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    derived: dict[str, Any] = field(default_factory=dict)


def read(path: str, flags: Sequence[Flag]) -> RunConfig:
    """The contents of ``path``. Raises ``ArgumentError``."""
    return RunConfig(given=custom_config.read(path, flags))


def write(args: Namespace, path: str) -> None:
    """Write what was given on the command line of ``args`` to ``path``."""
    import yaml

    given = {name: getattr(args, name) for name in sorted(args.explicit_flags - OWN_FLAGS)}
    Path(path).write_text(yaml.safe_dump(given, sort_keys=False))


def differences(args: Namespace, config: RunConfig) -> list[str]:
    """What the rules derive now, where it is not what they derived when the file was written."""
    return [
        f"--config: {name} was {old!r} when the file was written and is {getattr(args, name, None)!r} now"
        for name, old in config.derived.items()
        if getattr(args, name, None) != old
    ]
