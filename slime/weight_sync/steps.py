"""The steps of a weight push that are calls to the engines, for every transport."""

from __future__ import annotations

import logging
from typing import Any

from slime.weight_sync.fanout import FanOut, WeightSyncError

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 30.0


def health_check(control: FanOut, timeout: float) -> None:
    """Return when every server responds."""
    timeout = min(HEALTH_TIMEOUT_S, timeout)
    control.call("reach the server", lambda c: c.health(timeout), timeout)


def pause_and_flush(control: FanOut, pause_mode: Any, timeout: float) -> None:
    """Stop every engine and empty its prefix cache, which was computed with the old weights."""
    control.call(f"pause ({pause_mode})", lambda c: c.pause(pause_mode), timeout)
    # In-place pauses keep the cache for the requests they hold.
    if pause_mode != "in_place":
        control.call("flush the prefix cache", lambda c: c.flush_cache(timeout), timeout)


def verify_and_continue(control: FanOut, version: int, timeout: float) -> None:
    """Resume every engine. Raises WeightSyncError, and they stay paused, unless all report ``version``."""
    verify(control, version, timeout)
    resume(control, timeout)


def verify(control: FanOut, version: int, timeout: float) -> None:
    """Raise WeightSyncError unless all engines report ``version``."""
    seen = control.call("read the weight version", lambda c: c.weight_version(), timeout)
    wrong = [
        f"{client.url} reports {got!r}"
        for client, got in zip(control.clients, seen, strict=True)
        if got != str(version)
    ]
    if wrong:
        raise WeightSyncError(
            f"After pushing weight version {version}: {'; '.join(wrong)}. The push did not arrive whole; "
            "engines that were paused stay so. See the engines' logs under the run directory."
        )
    logger.info("Weight version %d is on %d engines.", version, len(seen))


def resume(control: FanOut, timeout: float) -> None:
    """Let every engine continue."""
    control.call("continue", lambda c: c.resume(), timeout)
