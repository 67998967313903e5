"""Processes of this host that are waited for and do not run: stopped by a signal (SIGSTOP), or by a debugger."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0


class StoppedProcesses:
    """Warns, once per process and stop, that one of those whose output goes to certain logs is stopped."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._known: set[int] = set()

    def look(self, what: str, names: Iterable[tuple[str, Path | None]]) -> None:
        """Look every ``LOOK_EVERY_S`` at most. ``what`` waits for ``names``, each with its log."""
        if time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        logs = {str(log): name for name, log in names if log is not None}
        stopped = dict(_stopped(logs))
        for pid in stopped.keys() - self._known:
            logger.warning(
                "%s waits for %s, whose process %d is stopped, by SIGSTOP or a debugger: kill -CONT %d resumes it",
                what, logs[stopped[pid]], pid, pid,
            )  # fmt: skip
        self._known = set(stopped)


def _stopped(logs: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield the stopped processes whose output goes to one of ``logs``, and that log."""
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if (directory / "stat").read_text().rpartition(")")[2].split()[0] in "Tt":
                log = os.readlink(directory / "fd" / "1")
                if log in logs:
                    yield int(directory.name), log
        except OSError:
            continue  # ended meanwhile, or another user's
