"""The limit of requests in flight: a semaphore whose limit follows what the engines do with them.

Engines report what they run and what waits there. A short queue at every engine is right: a slot that becomes free is
filled without the way to this process and back, and the next request still goes to whichever engine is free first. The
router decides where a request goes, so that the limit is one number for all engines, and the engine with the shortest
queue sets it: it must never run dry, no matter how many pile up at a slower one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from slime.rollout.requests.engines import EngineLoad, EngineLoads
from slime.servers.http_client import HttpRequestError
from slime.servers.http_utils import get_http_client

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
LOOK_INTERVAL_PER_ENGINE_S = 0.02
"""Engine loads are fetched one by one: with more than fifty, less often than every ``LOOK_INTERVAL_S``."""


def next_limit(limit: int, most: int, in_flight: int, loads: Sequence[EngineLoad], *, refused: int, short: bool) -> int:
    """Return the limit that follows ``limit``, from the number of live engines up to ``most``.

    ``refused`` of the requests in flight were refused and wait to be sent again. ``short``: some
    requests wait for a slot; otherwise nothing shows that the limit is too low.
    """
    engines = len(loads)
    surplus = engines * min(load.surplus for load in loads)
    if refused:
        surplus = max(surplus, refused)
    if surplus > 0:
        limit = min(limit, in_flight - surplus)
    elif surplus < 0 and short:
        limit = max(limit, in_flight - surplus)
    return max(engines, min(most, limit))


class RequestSlots(asyncio.Semaphore):
    """``async with slots`` around every request. At most ``most`` are in flight, ``--sglang-server-concurrency`` per
    engine, less those of engines that do not answer.

    Attributes:
        limit: how many may be in flight now.
        in_flight: how many are.
        waiting: how many wait for a slot.
        changed: called whenever one of these may have changed.
    """

    def __init__(self, most: int | Callable[[], int], engines: EngineLoads | None = None) -> None:
        self._most = most
        super().__init__(self.most)
        self.limit = self.most
        self.in_flight = self.waiting = 0
        self.changed: Callable[[], None] = lambda: None
        self._engines = engines
        self._over = 0
        self._refusals_told = False
        self._timer: asyncio.TimerHandle | None = None
        self._look: asyncio.Task[None] | None = None
        self._slot_seconds, self._since, self._counted_from = 0.0, time.monotonic(), time.monotonic()

    @property
    def most(self) -> int:
        """The most requests that may ever be in flight; more when engines join."""
        return self._most() if callable(self._most) else self._most

    async def acquire(self) -> Any:
        """Wait for a slot."""
        self.waiting += 1
        try:
            await super().acquire()
            self._count(+1)
        finally:
            self.waiting -= 1
            self.changed()
        self._look_later()
        return True

    def release(self) -> None:
        """Give a slot back; the next one who waits has it at once, unless the limit has been lowered."""
        self._count(-1)
        if self._over:
            self._over -= 1
        else:
            super().release()
        if not self.in_flight and not self.waiting:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._look is not None:
                self._look.cancel()
                self._look = None
        self.changed()

    def resize(self, limit: int) -> None:
        """Let ``limit`` requests be in flight. Those above a lower limit are left to end."""
        more, self.limit = limit - self.limit, limit
        while more > 0:
            more -= 1
            if self._over:
                self._over -= 1
            else:
                super().release()
        while more < 0 and not self.locked():
            more += 1
            self._value -= 1
        self._over -= more
        self.changed()

    def count_anew(self) -> None:
        """Restart the mean of ``metrics``."""
        self.metrics()

    def metrics(self) -> dict[str, float]:
        """Return the limit, and how many requests were in flight on average since the last call or ``count_anew``."""
        self._count(0)
        seconds = self._since - self._counted_from
        mean = self._slot_seconds / seconds if seconds > 0 else 0.0
        self._slot_seconds, self._counted_from = 0.0, self._since
        return {"rollout/requests/limit": self.limit, "rollout/requests/in_flight_mean": mean}

    def _count(self, change: int) -> None:
        now = time.monotonic()
        self._slot_seconds += self.in_flight * (now - self._since)
        self._since = now
        self.in_flight += change

    # Following the engines

    async def follow(self) -> None:
        """Set the limit to what the engines can take now."""
        if self._engines is None:
            return
        try:
            loads = await self._engines.read()
        except HttpRequestError as e:
            logger.debug("the router does not list its engines: %s", e)
            return
        if not loads:
            return  # all is well with none of them, and nothing can be learned
        most = max(1, min(self.most, self.most * len(loads) // self._engines.listed))
        refused = get_http_client().refused
        limit = next_limit(self.limit, most, self.in_flight, loads, refused=refused, short=self.waiting > 0)
        if refused and not self._refusals_told:
            self._refusals_told = True
            logger.warning(
                "the engines refuse %d of %d requests, which are sent again: from now on at most %d are in flight",
                refused, self.in_flight, limit,
            )  # fmt: skip
        if limit != self.limit:
            logger.debug("%d requests may be in flight, not %d: %s, %d refused", limit, self.limit, loads, refused)
            self.resize(limit)

    def _look_later(self) -> None:
        """Look once in a while as long as requests are in flight, and others wait for them."""
        if self._engines is not None and self._timer is None and self._look is None:
            delay = max(LOOK_INTERVAL_S, LOOK_INTERVAL_PER_ENGINE_S * self._engines.listed)
            self._timer = asyncio.get_running_loop().call_later(delay, self._begin_to_look)

    def _begin_to_look(self) -> None:
        self._timer = None
        if not self.waiting and not get_http_client().refused:
            self._look_later()  # no request waits for a slot: no need to ask every engine
            return
        self._look = asyncio.get_running_loop().create_task(self.follow(), name="engine-loads")
        self._look.add_done_callback(self._looked)

    def _looked(self, task: asyncio.Task[None]) -> None:
        if self._look is not task:
            return
        self._look = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("the limit of requests stays at %d: %r", self.limit, error)
        if self.in_flight or self.waiting:
            self._look_later()
