"""Cost of tests: seconds by test and by file, set-up and tear-down included."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SLOWEST = 40


def seconds_by_test(reports: Iterable[Any]) -> dict[str, float]:
    """Return the seconds of every test by its id. A fixture of a module counts for the first test that needs it."""
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        if getattr(report, "when", None) in ("setup", "call", "teardown"):  # errors of collection have no phase
            seconds[report.nodeid] += report.duration
    return dict(seconds)


def summary(seconds: dict[str, float]) -> str:
    """Return the slowest tests and the sum of every file that takes a second or more, one per line."""
    by_file: dict[str, float] = defaultdict(float)
    for test, spent in seconds.items():
        by_file[test.partition("::")[0]] += spent
    files = {name: spent for name, spent in by_file.items() if spent >= 1}
    parts = (
        [f"{sum(seconds.values()):8.1f} s  {len(seconds)} tests in {len(by_file)} files"],
        [f"slowest {SLOWEST} tests:", *_slowest_first(seconds)[:SLOWEST]],
        ["by file, 1 s and more:", *_slowest_first(files)],
    )
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _slowest_first(seconds: dict[str, float]) -> list[str]:
    return [f"{spent:8.1f} s  {name}" for name, spent in sorted(seconds.items(), key=lambda item: -item[1])]


def write_summary(path: Path, reports: Iterable[Any]) -> str:
    """Write the summary to ``path`` and return it."""
    text = summary(seconds_by_test(reports))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return text
