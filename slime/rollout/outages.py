"""Services that generation needs and slime does not run: judges, search indices, sandboxes, remote rewards.

The rule that distinguishes an item that always fails from a service that fails for all:

* A failure is held, and counts against its item once another one of the same service succeeds after it.
* A service is down when all that was asked of it since its last success has failed: at least ``LEAST`` items that had
  not failed before, and no fewer than are still in progress. It is then tried with one item after a growing pause, a
  new one and a held one in turn. What failed meanwhile counts against no item; the first success ends the outage.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from slime.servers.http_client import HttpRequestError
from slime.utils.types import Sample, iter_samples
from slime.utils.user_code import users_line

logger = logging.getLogger(__name__)

LEAST = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
ATTEMPTS = "failed_attempts"
"""The key in a sample's metadata: how often its group was given up by the generate function."""

_UNREACHABLE = {"ClientConnectionError", "ClientConnectorError", "TransportError", "APIConnectionError", "URLError"}
"""Errors of aiohttp, httpx, the openai and anthropic clients, and urllib, which need not be installed here."""


class ServiceOutage(RuntimeError):
    """A service failed for all for longer than ``--service-outage-timeout``: the run ends."""


def is_of_service(error: BaseException, own_urls: Iterable[str] = ()) -> bool:
    """Return whether ``error`` means that a service cannot be reached or does not do its work.

    Servers at ``own_urls`` are none: slime runs them.
    """
    if isinstance(error, HttpRequestError):
        refused = error.status is not None and 400 <= error.status < 500 and error.status != 429
        return not refused and not error.url.startswith(tuple(own_urls))
    if isinstance(error, ConnectionError):
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & _UNREACHABLE) or ("RequestException" in names and "ConnectionError" in names)


def with_users_line(error: BaseException) -> str:
    """Return the error in one line, the line of the user's code that it came through last."""
    where = users_line(error)
    return f"{type(error).__name__}: {error}" + (f", at {where}" if where else "")


def service_of(group: Sample | list[Any], default: str) -> str:
    """Return what generates ``group``: its environment, its generate function, or ``default``."""
    sample = next(iter_samples(group), None)
    if sample is None:
        return default
    if name := (sample.metadata or {}).get("environment"):
        return f"environment {name!r}"
    return sample.generate_function_path or default


@dataclass
class Service:
    """The known state of one service. Times are those of the running event loop."""

    name: str
    timeout_s: float
    is_down: bool = False
    why: str = ""
    began: float | None = None
    """The first failure since the last success."""
    pause_s: float = FIRST_PAUSE_S

    def failed(self, why: str, failing: int, under_way: int) -> bool:
        """Note a failure; ``failing`` have failed since the last success, ``under_way`` not ended. True: it is down."""
        if self.began is None:
            self.began = asyncio.get_running_loop().time()
        self.why = why
        if not self.is_down and failing >= max(LEAST, under_way):
            self.goes_down()
        return self.is_down

    def goes_down(self) -> None:
        """Report that it fails for all."""
        self.is_down, self.pause_s = True, FIRST_PAUSE_S
        logger.warning(
            "%s fails for all, and generation pauses: it is tried again after %g s, then after growing waits, for "
            "--service-outage-timeout %g s. The last error: %s", self.name, self.pause_s, self.timeout_s, self.why,
        )  # fmt: skip

    def next_pause(self) -> float:
        """Return how long to wait before it is tried again. Raises ServiceOutage when it has been down for too long."""
        down_s = self._down_s()
        if down_s >= self.timeout_s:
            raise ServiceOutage(
                f"{self.name} has failed for all for {down_s:.0f} s (--service-outage-timeout {self.timeout_s:g}). "
                f"The last error: {self.why}"
            )
        pause = min(self.pause_s, self.timeout_s - down_s)
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
        return pause

    def answered(self) -> None:
        """Note a success."""
        if self.is_down:
            logger.warning("%s answers again after %.0f s, and generation continues", self.name, self._down_s())
        self.is_down, self.began = False, None

    def _down_s(self) -> float:
        now = asyncio.get_running_loop().time()
        return 0.0 if self.began is None else now - self.began


@dataclass
class AwaitedService(Service):
    """A service whose callers wait for it themselves, each with one item: the server of a reward."""

    waiting: dict[int, int] = field(default_factory=dict)
    """Failures since the last success, by item."""
    under_way: int = 0
    successes: int = 0
    _answered: asyncio.Event = field(default_factory=asyncio.Event)

    def answered(self) -> None:
        """Note a success: what is held counts now."""
        super().answered()
        self.successes += 1
        self.waiting.clear()
        self._answered.set()
        self._answered = asyncio.Event()

    def hold(self, item: int, error: Exception) -> None:
        """Note that ``item`` failed."""
        self.waiting[item] = self.waiting.get(item, 0) + 1
        self.failed(with_users_line(error), len(self.waiting), self.under_way - len(self.waiting))

    async def another_try(self, item: int, error: Exception) -> None:
        """Return when ``item`` may be tried again: after a growing pause, or when another one succeeded.

        Raises ServiceOutage, from ``error``.
        """
        try:
            longest = self.next_pause() if self.is_down else LONGEST_PAUSE_S
        except ServiceOutage as outage:
            raise outage from error
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(FIRST_PAUSE_S * 2.0 ** (self.waiting[item] - 1), longest)):
                await self._answered.wait()


# Prompts that are given up


def failed_attempts(group: Sample | list[Any]) -> int:
    """Return how many attempts of a group have counted against it."""
    return max((int((sample.metadata or {}).get(ATTEMPTS, 0)) for sample in iter_samples(group)), default=0)


def count_attempt(group: Sample | list[Any]) -> int:
    """Note one more failed attempt in the metadata of a group's samples; return their number."""
    attempts = 1 + failed_attempts(group)
    for sample in iter_samples(group):
        sample.metadata = {**(sample.metadata or {}), ATTEMPTS: attempts}
    return attempts


def given_up(sample: Sample, reward_key: str | None, why: str) -> Sample:
    """Make ``sample``, which has no response, one that trains nothing: FAILED, reward 0, ``remove_sample``."""
    sample.status = Sample.Status.FAILED
    sample.reward = {reward_key: 0.0} if reward_key else 0.0
    sample.remove_sample = True
    sample.tokens = sample.tokens or [0]  # a sample without a token has no place in a batch
    sample.metadata = {**(sample.metadata or {}), "abort_error": why}
    return sample
