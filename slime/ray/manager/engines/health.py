"""Health checks of engines: a single probe, and a monitor that probes all engines at intervals."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from slime.servers.engine_client import EngineClient
from slime.servers.http import EngineError
from slime.servers.types import EngineInfo

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Hashable)

IDLE = "idle"
"""The reason to pause while the engines get no requests, or are offloaded."""


@dataclass(frozen=True)
class HealthLimits:
    """The limits by which an engine counts as failed.

    Attributes:
        interval: seconds between two rounds of probes.
        failures: how many probes in a row must fail.
        first_wait: seconds without probes after every ``resume``.
        grace: an engine that has not responded yet gets this many seconds for its first response.
    """

    interval: float
    failures: int
    first_wait: float = 0.0
    grace: float = 0.0


class EngineHealth:
    """Probe results of one engine. Failures count from the first success on, or once ``grace`` is over."""

    def __init__(self, limits: HealthLimits, now: float) -> None:
        self._limits, self._since = limits, now
        self._has_answered = False
        self.failures = 0

    def record(self, error: str | None, now: float) -> bool:
        """Record a probe's result, None for success; return True when the engine has failed for good."""
        if error is None:
            self._has_answered, self.failures = True, 0
            return False
        if not self._has_answered and now - self._since < self._limits.grace:
            return False
        self.failures += 1
        return self.failures >= self._limits.failures

    def forget_failures(self) -> None:
        """Failures in a row are over: there has been a pause between them."""
        self.failures = 0


class HealthMonitor(Generic[E]):
    """A thread that probes all engines at once, again and again, while there is no reason to pause.

    ``engines`` returns those to probe, ``probe(engine)`` returns None or what is wrong, within its own deadline.
    ``on_failure(engine, reason)`` is called from the thread. It starts paused, for the reason ``IDLE``. A probe that
    was in progress at a ``pause`` does not count: engines do not answer while they are offloaded or take weights.
    """

    def __init__(
        self,
        limits: HealthLimits,
        engines: Callable[[], Iterable[E]],
        probe: Callable[[E], str | None],
        on_failure: Callable[[E, str], None],
    ) -> None:
        self.limits = limits
        self._engines, self._probe, self._on_failure = engines, probe, on_failure
        self._changed = threading.Condition()
        self._reasons_to_pause = {IDLE}
        self._active_since = 0.0
        self._episode = 0
        self._stopped = False
        self._health: dict[E, EngineHealth] = {}
        self._thread = threading.Thread(target=self._run, name="engine-health", daemon=True)
        self._thread.start()

    @property
    def is_active(self) -> bool:
        """True while there is no reason to pause."""
        return not self._reasons_to_pause

    def resume(self, why: str = IDLE) -> None:
        """Remove the reason ``why``. Without another one, engines are probed from now on: the first time after
        ``first_wait`` and an interval, and failures of before do not count.
        """
        with self._changed:
            if why in self._reasons_to_pause:
                self._reasons_to_pause.remove(why)
                self._active_since = time.monotonic()
                self._new_episode()

    def pause(self, why: str = IDLE) -> None:
        """Stop probing for the reason ``why``; results of probes in progress are dropped."""
        with self._changed:
            self._reasons_to_pause.add(why)
            self._new_episode()

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _new_episode(self) -> None:
        self._episode += 1
        for health in self._health.values():
            health.forget_failures()
        self._changed.notify_all()

    def _run(self) -> None:
        while (episode := self._next_round()) is not None:
            try:
                self.check(episode)
            except Exception:  # a later round may succeed
                logger.exception("checking the engines' health")

    def _next_round(self) -> int | None:
        """Wait until a round is due; return its episode, None when the monitor was stopped."""
        with self._changed:
            episode, due = -1, float("inf")
            while not self._stopped:
                if not self.is_active:
                    episode, due = -1, float("inf")
                elif episode != self._episode:
                    rested = self._active_since + self.limits.first_wait
                    episode, due = self._episode, max(rested, time.monotonic()) + self.limits.interval
                left = due - time.monotonic()
                if left <= 0:
                    return episode
                self._changed.wait(None if left == float("inf") else left)
            return None

    def check(self, episode: int | None = None) -> None:
        """One round: probe every engine once, and report those that have failed too often."""
        episode = self._episode if episode is None else episode
        engines = list(self._engines())
        now = time.monotonic()
        self._health = {e: self._health.get(e) or EngineHealth(self.limits, now) for e in engines}
        for engine, error in zip(engines, self._probe_all(engines), strict=True):
            with self._changed:
                if episode != self._episode or self._stopped:
                    return
                health = self._health[engine]
                failed = health.record(error, time.monotonic())
            if error is not None and not failed:
                logger.warning("%s: health check failed (%d of %d in a row): %s",
                               engine, health.failures, self.limits.failures, error)  # fmt: skip
            if failed:
                self._on_failure(engine, f"{health.failures} health checks in a row failed, the last: {error}")

    def _probe_all(self, engines: Sequence[E]) -> list[str | None]:
        if not engines:
            return []
        with ThreadPoolExecutor(len(engines), thread_name_prefix="health-check") as pool:
            return list(pool.map(self._probe, engines))


ANSWER_TIMEOUT_S, ANSWER_ATTEMPTS = 10.0, 3
"""Attempts, and seconds for each, before an engine counts as not responding."""


def check_generates(info: EngineInfo, timeout: float) -> str | None:
    """Return why the engine does not generate within ``timeout`` s, else None; not for paused engines."""
    try:
        _client(info).health_generate(timeout)
    except EngineError as e:
        return str(e)
    return None


def check_alive(info: EngineInfo) -> str | None:
    """Return why the engine does not respond at all, else None; any reply counts, also while paused."""
    error = None
    for _ in range(ANSWER_ATTEMPTS):
        try:
            _client(info).loads(timeout=ANSWER_TIMEOUT_S)
        except EngineError as e:
            if e.status is not None:
                return None
            error = str(e)
        else:
            return None
    return error


def _client(info: EngineInfo) -> EngineClient:
    return EngineClient.of(info)
