"""Source ``scripts/models/*.sh`` and resolve what they say, in tests."""

from __future__ import annotations

import os
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parents[2] / "scripts" / "models"


def source(name: str, cwd: Path | str = "/", **variables: str) -> list[str]:
    """``MODEL_ARGS`` after sourcing the script of ``name`` in a bash that stops at every mistake."""
    return bash(f'source "{SCRIPTS}/{name}.sh"; printf "%s\\0" "${{MODEL_ARGS[@]}}"', cwd, **variables).split("\0")[:-1]


def bash(commands: str, cwd: Path | str = "/", **variables: str) -> str:
    """Return the output of ``commands`` under ``set -euo pipefail``."""
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=cwd, env=environment, check=True, text=True, capture_output=True,
    ).stdout  # fmt: skip


def model_namespace(
    words: Sequence[str], hf_checkpoint: str, *, changed: Sequence[str] = (), **values: object
) -> Namespace:
    """The attributes a dry run with ``words`` has when the model flags are compared with the checkpoint.

    ``changed``: flags that take their values only then, past the rules that look at sizes before.
    """
    from slime.arguments import diagnostics
    from slime.arguments.command_line import read_words

    args = Namespace(**{**vars(_derived(tuple(words))), "hf_checkpoint": hf_checkpoint, "dry_run": True, **values})
    diagnostics.begin(args)
    if changed:
        vars(args).update(read_words(_parser_and_defaults()[0], changed)[0])
    return args


@cache
def _derived(words: tuple[str, ...]) -> Namespace:
    from slime.arguments import diagnostics
    from slime.arguments.command_line import read_words
    from slime.arguments.rules import megatron

    parser, defaults = _parser_and_defaults()
    args = Namespace(**{**defaults, "dry_run": True, **read_words(parser, words)[0]})
    args.explicit_flags = frozenset()
    diagnostics.begin(args)
    megatron.derive(args)
    return args


@cache
def _parser_and_defaults() -> tuple[ArgumentParser, dict[str, Any]]:
    from slime.arguments.command_line import all_flags, build_parser

    flags = [flag for flag in all_flags() if flag.source in ("slime", "megatron")]  # argparse is slow with many
    return build_parser(flags), {flag.dest: flag.default for flag in flags}
