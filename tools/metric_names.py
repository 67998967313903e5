"""Compare metric names with ``docs/en/reference/metrics.md``, whose tables are the list of what slime logs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "en" / "reference" / "metrics.md"
_ROW = re.compile(r"^\| `([a-z_]+/[^`]+)` \|", re.MULTILINE)
_PART = re.compile(r"\{([^}]*)\}|(<\w+>)|([^{<]+)")


def documented_patterns(text: str | None = None) -> list[re.Pattern[str]]:
    """Return a pattern per table row: ``{a,b}`` is one of several texts, ``<x>`` any text without a slash."""
    return [_pattern(name) for name in _ROW.findall(PAGE.read_text(encoding="utf-8") if text is None else text)]


def _pattern(name: str) -> re.Pattern[str]:
    def part(match: re.Match[str]) -> str:
        choices, value, plain = match.groups()
        if choices is not None:
            return "(" + "|".join(map(re.escape, choices.split(","))) + ")"
        return "[^/]+" if value else re.escape(plain)

    return re.compile(_PART.sub(part, name))


def undocumented(names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that no row describes, sorted."""
    patterns = documented_patterns()
    return sorted({name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)})


def names_of_run(run_dir: str | Path) -> set[str]:
    """Return the names in a run's ``metrics.jsonl``."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {json.loads(line)["name"] for line in lines}
