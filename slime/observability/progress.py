"""Progress of long work: a bar on a terminal, now and then a log line elsewhere (Ray actors, CI, files)."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = float(os.environ.get("SLIME_PROGRESS_INTERVAL", "15"))


class Starting:
    """Logs what the start of a run waits for, step by step, and how long it has taken so far."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def waits_for(self, what: str) -> None:
        """Log that ``what`` is the next step."""
        logger.info("starting (%.0f s): %s", time.monotonic() - self._begin, what)

    def done(self) -> None:
        """Log that the start is over."""
        logger.info("started in %.0f s", time.monotonic() - self._begin)


class Progress:
    """Counts finished units; ``stats`` are numbers worth seeing beside the count (reward, tokens per second)."""

    def __init__(self, name: str, total: int | None, unit: str, interval_s: float) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.count = 0
        self.stats: dict[str, Any] = {}
        self._begin = self._last_log = time.monotonic()
        self._interval_s = interval_s
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=name, unit=unit, file=sys.stderr, dynamic_ncols=True, leave=False)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    def update(self, n: int = 1, **stats: object) -> None:
        """Count ``n`` more units as done and remember ``stats``."""
        self.count += n
        self.stats.update(stats)
        if self._bar is not None:
            if stats:
                self._bar.set_postfix(self.stats, refresh=False)
            self._bar.update(n)
        elif time.monotonic() - self._last_log >= self._interval_s:
            self._last_log = time.monotonic()
            logger.info("%s", self)

    def close(self) -> None:
        """Remove the bar; without a terminal, log the final count once."""
        if self._bar is not None:
            self._bar.close()
        elif self.elapsed >= self._interval_s:
            logger.info("%s, done", self)

    def __str__(self) -> str:
        share = f"/{self.total}" if self.total is not None else ""
        rate = self.count / self.elapsed if self.elapsed > 0 else 0.0
        left = ""
        if self.total is not None and 0 < self.count < self.total:
            left = f", about {(self.total - self.count) / rate:.0f} s left"
        stats = "".join(f", {k} {v:.4g}" if isinstance(v, float) else f", {k} {v}" for k, v in self.stats.items())
        return f"{self.name}: {self.count}{share} {self.unit} in {self.elapsed:.0f} s ({rate:.3g}/s{left}){stats}"


@contextmanager
def progress_bar(
    name: str, total: int | None = None, unit: str = "it", *, interval_s: float = LOG_INTERVAL_S
) -> Iterator[Progress]:
    """Yield a :class:`Progress` for ``total`` units of work (None: unknown).

    On a terminal a tqdm bar is drawn on stderr; otherwise a log line appears every ``interval_s`` seconds at most.
    """
    progress = Progress(name, total, unit, interval_s)
    try:
        yield progress
    finally:
        progress.close()
