"""Lines of the log that whoever sends requests can cause as often as they like, and that must not fill a disk."""

from __future__ import annotations

import logging
import time

PERIOD_S = 60.0
MOST = 50
LONGEST = 500
"""Characters of one message."""


class BoundedLog:
    """Logs at most ``MOST`` messages in ``PERIOD_S`` seconds, and how many were left out before."""

    def __init__(self, logger: logging.Logger, level: int = logging.WARNING) -> None:
        self.logger, self.level = logger, level
        self._begun, self._count = -PERIOD_S, 0

    def admits(self) -> bool:
        """Count one more message; return whether it may be logged."""
        now = time.monotonic()
        if now - self._begun >= PERIOD_S:
            if self._count > MOST:
                self.logger.log(self.level, "%d more messages like the last ones were left out", self._count - MOST)
            self._begun, self._count = now, 0
        self._count += 1
        return self._count <= MOST

    def tell(self, message: str, *values: object) -> None:
        """Log ``message % values`` unless there have been too many."""
        if self.admits():
            text = message % values if values else message
            self.logger.log(
                self.level, "%s", text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"
            )
