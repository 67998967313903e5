"""Run one stage of the quickstart as a child process, with a deadline, and tell how it goes."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slime.utils.process_guard import GuardedProcess, spawn

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 60
"""Seconds a stage gets to end its own processes after it has been asked to."""


class StageError(Exception):
    """A stage failed or ran out of time."""


def show_command(command: list[str]) -> str:
    """Return ``command`` as a user can paste it: one flag and its values per line."""
    lines = [shlex.join(command[: 2 if command[0].startswith("python") else 1])]
    for word in command[2:]:
        if word.startswith("--") or lines[-1].startswith("python"):
            lines.append(shlex.quote(word))
        else:
            lines[-1] += " " + shlex.quote(word)
    wrapped = [lines[0]]
    for line in lines[1:]:
        if len(wrapped[-1]) + len(line) < 110:
            wrapped[-1] += " " + line
        else:
            wrapped.append("    " + line)
    return " \\\n".join(wrapped)


def run_stage(
    name: str,
    command: list[str],
    log: Path,
    *,
    deadline_s: float,
    metrics: Path | None = None,
    describe: Callable[[dict[str, Any]], str | None] = lambda row: None,
) -> float:
    """Run ``command`` (``python ...``) in the checkout, its output in ``log``; return the seconds it took.

    ``describe`` is called with every new row of ``metrics`` and returns a line to print, or None. Raises StageError
    with the end of the log when the command fails or is not done after ``deadline_s`` seconds. Whatever ends this
    function or this process ends the command and all that it started.
    """
    print(f"\n{show_command(command)}\n", flush=True)
    log.unlink(missing_ok=True)
    begin = time.monotonic()
    process = spawn([sys.executable, "-u", *command[1:]], None, log.absolute(), name, cwd=str(ROOT))
    rows = _follow(metrics) if metrics else itertools.repeat([])
    try:
        while (code := process.poll()) is None:
            if time.monotonic() - begin > deadline_s:
                raise StageError(f"{name} was not done after {deadline_s:.0f} s\n{_end_of(log, process)}")
            _tell(next(rows), describe)
            time.sleep(0.5)
        _tell(next(rows), describe)
    finally:
        process.stop(GRACE_S)
    if code:
        raise StageError(f"{name} failed with exit status {code}\n{_end_of(log, process)}")
    seconds = time.monotonic() - begin
    print(f"  {name} took {seconds:.0f} s", flush=True)
    return seconds


def _tell(rows: list[dict[str, Any]], describe: Callable[[dict[str, Any]], str | None]) -> None:
    for row in rows:
        if line := describe(row):
            print(f"  {line}", flush=True)


def _follow(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield, at every step, the complete rows that ``path`` got since the last one."""
    position = 0
    while True:
        rows = []
        if path.exists():
            with path.open("rb") as file:
                file.seek(position)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    position += len(line)
                    rows.append(json.loads(line))
        yield rows


def _end_of(log: Path, process: GuardedProcess) -> str:
    return "\n".join([f"--- the end of {log} ---", *process.last_lines(40)])
