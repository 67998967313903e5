"""Typical command lines and the pages that ``--dry-run`` prints for them, without configuration and memory.

``python -m tests.support.plan_pages`` writes the pages again; read the difference before it is committed.
"""

from __future__ import annotations

import contextlib
import shlex
from argparse import Namespace
from pathlib import Path

import yaml

from tests.support.arguments import known

PAGES = Path(__file__).parents[1] / "data" / "arguments" / "plans"


def command_lines() -> dict[str, str]:
    """Name of the page -> command line."""
    file: dict[str, dict[str, str]] = yaml.safe_load((PAGES / "command_lines.yaml").read_text())
    return {name: _with_model(line, file["models"]) for name, line in file["command_lines"].items()}


def _with_model(line: str, models: dict[str, str]) -> str:
    return " ".join(models.get(word, word) for word in line.split())


def resolved(command_line: str) -> Namespace:
    """Return the arguments that ``--dry-run`` resolves from a command line."""
    from slime.arguments.parse import resolve

    return resolve(["--dry-run", *shlex.split(command_line)], *known())


def page(command_line: str) -> str:
    """The page of a command line without configuration and memory, which have tests of their own."""
    from slime.preflight.plan import plan
    from slime.preflight.plan.render import sections, verdict

    with contextlib.chdir(PAGES.parents[3]):
        args = resolved(command_line)
    planned = plan(args, overlap=False)
    lines: list[str] = []
    for title, body in sections(args, planned):
        if title != "Memory":
            lines += [title, *body, ""]
    return "\n".join([*lines, *verdict(args, planned), ""])


def main() -> None:
    """Write the pages."""
    for name, command_line in command_lines().items():
        (PAGES / f"{name}.txt").write_text(page(command_line))


if __name__ == "__main__":
    main()
