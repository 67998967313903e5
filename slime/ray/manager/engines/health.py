"""Engines that fail are found: by a probe, by a monitor that probes all at intervals, by answers of no use."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from slime.ray.manager.engines.members import Member, Members, State
from slime.ray.manager.engines.served_model import ServedModel
from slime.servers.engine_client import EngineClient
from slime.servers.http import EngineError
from slime.servers.http_replies import wrong_with
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
        EngineClient.of(info).health_generate(timeout)
    except EngineError as e:
        return str(e)
    return None


def check_alive(info: EngineInfo) -> str | None:
    """Return why the engine does not respond at all, else None; any reply counts, also while paused."""
    error = None
    for _ in range(ANSWER_ATTEMPTS):
        try:
            EngineClient.of(info).loads(timeout=ANSWER_TIMEOUT_S)
        except EngineError as e:
            if e.status is not None:
                return None
            error = str(e)
        else:
            return None
    return error


REJECTIONS_LIMIT, REJECTIONS_WINDOW_S = 3, 600.0
"""So many rejected answers of one engine within this time take it off."""
ASK_AGAIN_S = 5.0
"""Between two searches for the engine that gives wrong answers, where the router does not name it."""
ASK_TIMEOUT_S = 60.0
ASK_PROMPT, ASK_TOKENS = [1, 2, 3, 4, 5, 6, 7, 8], 4


class Rejections:
    """Counts rejected answers by engine; ``mark_dead(member, reason)`` is called for one that gives too many.

    Where the router does not say which engine answered, all engines of the model are asked for a few tokens each. That
    finds one whose weights are broken or old, and not one that is wrong now and then.
    """

    def __init__(
        self, members: Members, models: Sequence[ServedModel], mark_dead: Callable[[Member, str], None]
    ) -> None:
        self._members, self._models, self._mark_dead = members, models, mark_dead
        self._asked_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def note(self, router_url: str, engine_url: str | None, wrong: str, oldest_version: int | None) -> None:
        """Count an answer that was rejected. Returns at once: what follows happens on a thread."""
        model = next((model for model in self._models if model.running_router.url == router_url), None)
        if model is None:
            return
        serving = model.of(State.SERVING)
        member = next((m for m in serving if m.known_info.url == engine_url), None)
        now, count = time.monotonic(), 0
        with self._lock:
            self._members.rejected_of[model.name] += 1
            if member is not None:
                member.rejected.append(now)
                count = sum(now - at < REJECTIONS_WINDOW_S for at in member.rejected)
            ask = engine_url is None and now - self._asked_at.get(model.name, -ASK_AGAIN_S) >= ASK_AGAIN_S
            if ask:
                self._asked_at[model.name] = now
        who = engine_url or f"an engine behind {router_url}" if member is None else f"{member} ({engine_url})"
        logger.warning("an answer of %s is not used, and its request is sent again: %s", who, wrong)
        if member is not None and count >= REJECTIONS_LIMIT:
            reason = f"{count} of its answers could not be used, the last: {wrong}"
            _begin(lambda: self._mark_dead(member, member.describe_failure(reason)))
        elif ask:
            _begin(lambda: self._ask_all(serving, oldest_version))

    def _ask_all(self, members: Sequence[Member], oldest_version: int | None) -> None:
        with ThreadPoolExecutor(max(1, len(members))) as pool:
            found = list(pool.map(lambda m: _wrong_answer(m, oldest_version), members))
        for member, wrong in zip(members, found, strict=True):
            if wrong is not None:
                reason = f"answers came that could not be used, and its answer to a check cannot either: {wrong}"
                self._mark_dead(member, member.describe_failure(reason))


def _begin(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="rejected-answers", daemon=True).start()


def _wrong_answer(member: Member, oldest_version: int | None) -> str | None:
    """Return what is wrong with what the engine generates; None also for one that does not answer."""
    payload = {
        "input_ids": ASK_PROMPT,
        "sampling_params": {"max_new_tokens": ASK_TOKENS, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
    }
    try:
        return wrong_with(member.client.generate(payload, ASK_TIMEOUT_S), oldest_version)
    except EngineError as e:
        logger.debug("%s does not answer the check of its answers: %s", member, e)
        return None
