"""Scoring samples, and what happens when a reward takes long or cannot be computed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import statistics
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from slime.algorithms.reward_types import reward_type
from slime.arguments.args import Args
from slime.rollout.cancelling import caller_is_cancelled, end_if_cancelled, gather_or_cancel
from slime.rollout.hooks.hook import find_hook, innermost, with_notes
from slime.rollout.outages import AwaitedService, ServiceOutage, is_of_service
from slime.rollout.rm_hub import reward_hook, reward_kind, rewards_of, scored_together
from slime.rollout.rm_hub.failure import BadReward, LateFailures, RewardFailure, TooManyRewardFailures
from slime.rollout.rm_hub.workers import get_reward_workers
from slime.servers.http_client import HttpRequestError
from slime.utils.types import Sample, iter_samples
from slime.utils.user_code import users_frames

logger = logging.getLogger(__name__)

TOLERATED_ERRORS = 4
"""A rollout tolerates this many failed rewards, or ``--reward-failure-tolerance``, whichever is more."""
LOGGED_PER_CAUSE = 3
"""Failed rewards of one cause that are logged one by one; the others of a rollout share a line."""


class RewardErrors:
    """Scores the samples of one rollout, times the rewards and counts those that failed.

    A failed reward costs its sample: reward 0, ``remove_sample`` and ``metadata["reward_error"]``. When more than the
    tolerated share fails, the rollout stops. ``args`` starts the worker processes that it will need.

    Attributes:
        late: set at the end of the rollout, which counts no more: where rewards that fail after it are kept for the
            next rollout that gets their samples.
    """

    def __init__(self, args: Args | None = None) -> None:
        self.scored = 0
        self.failed: list[int | None] = []
        self.kinds: Counter[str] = Counter()
        self.latencies: dict[str, list[float]] = defaultdict(list)
        self.late: LateFailures | None = None
        self._under_way = 0
        self._first = ""
        self._same_cause: dict[tuple[str, ...], list[int | None]] = {}
        self._services: dict[str, AwaitedService] = {}
        if args is None or args.custom_rm_path is not None:
            return
        entry = reward_type(args.rm_type)
        if entry is not None and entry.rule:  # rules of single samples start workers when they come
            get_reward_workers(args)

    def metrics(self, prefix: str = "rollout/") -> dict[str, float]:
        """Return ``reward/failures`` in all and by kind, and ``reward/latency/<type>/mean`` and ``p99`` in seconds.

        Logs the failures that have not been logged one by one.
        """
        if not self.scored:
            return {}
        for indices in self._same_cause.values():
            if others := indices[LOGGED_PER_CAUSE:]:
                logger.error(
                    "no reward for %d more samples for the same reason as for sample index=%s, they are left out of "
                    "the loss: %s%s", len(others), indices[0], others[:20], " ..." if len(others) > 20 else "",
                )  # fmt: skip
                del indices[LOGGED_PER_CAUSE:]
        found: dict[str, float] = {f"{prefix}reward/failures": len(self.failed)}
        for kind, count in sorted(self.kinds.items()):
            found[f"{prefix}reward/failures/{kind}"] = count
        for kind, seconds in sorted(self.latencies.items()):
            found[f"{prefix}reward/latency/{kind}/mean"] = statistics.fmean(seconds)
            found[f"{prefix}reward/latency/{kind}/p99"] = sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1]
        return found

    def count_anew(self) -> None:
        """Count for the next rollout; rewards that are being computed belong to it."""
        self.scored, self.failed, self.late, self._first = self._under_way, [], None, ""
        self.kinds.clear()
        self.latencies.clear()
        self._same_cause.clear()

    async def score_one(self, args: Args, sample: Sample, rm: Callable[..., Awaitable[Any]]) -> None:
        """Set ``sample.reward`` to ``rm(args, sample)``. Raises NotImplementedError for an unknown reward."""
        reward_hook(args, sample)  # one that cannot be loaded stops the run at once
        found, reward = await self._attempt(args, [sample], lambda: rm(args, sample))
        if found:
            sample.reward = reward

    async def score_batch(self, args: Args, samples: list[Any], rm: Callable[..., Awaitable[Any]]) -> None:
        """Set the rewards of ``samples``, which may be lists of samples, to what ``rm(args, samples)`` returns.

        ``rm`` is called with all samples that ``args.custom_rm_path`` scores, as they are nested if those are all, and
        with each of the others by itself.
        """

        async def score_alone(args: Args, sample: Sample) -> Any:
            return (await rm(args, [sample]))[0]

        flat = list(iter_samples(samples))
        together = [sample for sample in flat if scored_together(args, sample)]
        coros = [self.score_one(args, s, score_alone) for s in flat if not scored_together(args, s)]
        if together:
            coros.append(self._score_together(args, together if coros else samples, rm))
        await gather_or_cancel(coros)

    async def _score_together(self, args: Args, samples: list[Any], rm: Callable[..., Awaitable[Any]]) -> None:
        find_hook(args, "custom_rm_path")
        flat = list(iter_samples(samples))
        found, returned = await self._attempt(args, flat, lambda: rm(args, samples))
        if found:
            for sample, reward in zip(flat, rewards_of(args, samples, returned), strict=True):
                sample.reward = reward

    async def _attempt(
        self, args: Args, samples: Sequence[Sample], ask: Callable[[], Awaitable[Any]]
    ) -> tuple[bool, Any]:
        """Await a reward; return ``(True, it)``, or ``(False, None)`` when it failed and that is tolerated."""
        self.scored += len(samples)
        self._under_way += len(samples)
        kind, began = reward_kind(args, samples[0]), time.monotonic()
        try:
            return True, await self._answer(args, samples, kind, ask)
        except (NotImplementedError, BadReward, ServiceOutage):
            raise
        except Exception as e:  # noqa: BLE001  (any error of a reward costs its samples, and is counted)
            end_if_cancelled()
            for sample in samples:
                self._record(args, sample, e)
            return False, None
        finally:
            self._under_way -= len(samples)
            self.latencies[kind].append(time.monotonic() - began)

    async def _answer(self, args: Args, samples: Sequence[Sample], kind: str, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Return the reward. One whose server does not answer is requested again: see ``slime.rollout.outages``."""
        hook = reward_hook(args, samples[0])
        entry = reward_type(kind)
        of_url = f" of {args.rm_url}" if entry is not None and entry.needs_url else ""
        name = f"reward {hook}" if hook else f"reward {kind}{of_url}"
        service = self._services.setdefault(name, AwaitedService(name, args.service_outage_timeout))
        item, attempts = id(samples[0]), 0
        service.under_way += 1
        try:
            while True:
                successes = service.successes
                try:
                    found = await _with_deadline(args, ask(), samples)
                except Exception as e:
                    end_if_cancelled()
                    attempts += 1
                    if not is_of_service(e) or service.successes > successes:  # others succeeded meanwhile
                        raise
                    service.hold(item, e)
                    if not service.is_down and attempts >= args.max_prompt_attempts:
                        raise
                    await service.another_try(item, e)
                else:
                    end_if_cancelled()
                    service.answered()
                    return found
        finally:
            service.under_way -= 1
            service.waiting.pop(item, None)

    def count_late(self, args: Args, late: LateFailures, samples: Iterable[Sample]) -> None:
        """Count rewards of ``samples`` that failed after another rollout had left them behind."""
        for sample, error in late.take(samples):
            self.scored += 1
            self._count(args, sample, error)

    def _record(self, args: Args, sample: Sample, error: Exception) -> None:
        key = args.reward_key
        # At once: a thread that saves the sample meanwhile must not find a reward that is to be trained on.
        sample.__dict__.update(
            reward={key: 0.0} if key else 0.0,
            remove_sample=True,
            metadata={**(sample.metadata or {}), "reward_error": f"{type(error).__name__}: {error}"},
        )
        failure = RewardFailure(_kind_of(error), str(error), _details(error))
        self._log(sample, error, failure)
        if self.late is None:
            self._count(args, sample, error)
        else:
            self.late.add(sample, failure)

    def _log(self, sample: Sample, error: Exception, failure: RewardFailure) -> None:
        """Log the first failures of a cause: the same kind and type, from the same line of code."""
        lines = re.findall(r'File ".+", line \d+', failure.details)
        cause = (failure.kind, type(error).__name__, str(getattr(error, "status", "")), *lines[-1:])
        indices = self._same_cause.setdefault(cause, [])
        indices.append(sample.index)
        if len(indices) <= LOGGED_PER_CAUSE:
            why = with_notes(error)
            logger.error("no reward for sample index=%s, it is left out of the loss: %s", sample.index, why)

    def _count(self, args: Args, sample: Sample, error: Exception) -> None:
        self.failed.append(sample.index)
        self.kinds[_kind_of(error)] += 1
        if not self._first:
            self._first = f"sample index={sample.index}: {error}\n{_details(error)}".rstrip()
        share = args.reward_failure_tolerance
        if len(self.failed) > (max(TOLERATED_ERRORS, share * self.scored) if share else 0):
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
            raise TooManyRewardFailures(
                f"{len(self.failed)} of {self.scored} rewards failed ({kinds}), more than the tolerated {share:.0%} "
                f"(--reward-failure-tolerance); samples {self.failed[:20]}; the first: {self._first}"
            ) from error


def _kind_of(error: Exception) -> str:
    if isinstance(error, RewardFailure):
        return error.kind
    if isinstance(error, HttpRequestError):
        return "remote"
    return "timeout" if isinstance(error, TimeoutError) else "raised"


def _details(error: Exception) -> str:
    """Return the traceback where the reward failed: in its worker, if it had one, or in the user's code."""
    if isinstance(error, RewardFailure):
        return error.details
    text = "".join(traceback.format_exception(error))
    own = users_frames(text)
    return "\n".join([*own, *traceback.format_exception_only(error)]) if own else text


async def _with_deadline(args: Args, reward: Awaitable[Any], samples: Sequence[Sample]) -> Any:
    """Await a reward; errors name the samples, and so does a warning when it is slow.

    The deadline is ``reward_timeout``, else ``rollout_request_timeout``. RuntimeError for one that is cancelled though
    the caller was not.
    """
    limit = args.reward_timeout or args.rollout_request_timeout
    hook = reward_hook(args, samples[0])
    name, function = (reward_kind(args, samples[0]), None) if hook is None else (str(hook), innermost(hook.function))
    names = f"samples {[s.index for s in samples]}"
    try:
        with _slow.watching([s.index for s in samples], limit, name, function):
            async with asyncio.timeout(limit) as scope:
                return await reward
    except TimeoutError as e:
        if scope.expired():
            raise TimeoutError(f"the reward of {names} took more than {limit:g} s (--reward-timeout)") from e
        e.add_note(f"while computing the reward of {names}")
        raise
    except asyncio.CancelledError as e:
        if caller_is_cancelled():
            raise
        raise RuntimeError(f"the reward of {names} was cancelled unexpectedly") from e
    except Exception as e:
        e.add_note(f"while computing the reward of {names}")
        raise


SLOW_S = 30.0
"""A reward that takes longer is named, and then at most one message per such a time is written."""


@dataclass(frozen=True)
class _Reward:
    began: float
    limit_s: float
    indices: Sequence[int | None]
    name: str
    function: Callable[..., Any] | None
    event_loop: int  # the thread it is awaited in


class SlowRewards:
    """Watches rewards in progress from a separate thread: one that blocks the event loop cannot block that."""

    def __init__(self, slow_s: float | None = None) -> None:
        self._slow_s = slow_s
        self._under_way: dict[int, _Reward] = {}
        self._lock = threading.Lock()
        self._watcher: threading.Thread | None = None

    @contextlib.contextmanager
    def watching(
        self, indices: Sequence[int | None], limit_s: float, name: str, function: Callable[..., Any] | None
    ) -> Iterator[None]:
        """Within the block the reward ``name`` of the samples ``indices`` is in progress, for ``limit_s`` at most."""
        reward = _Reward(time.monotonic(), limit_s, indices, name, function, threading.get_ident())
        with self._lock:
            self._under_way[id(reward)] = reward
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="slow-rewards", daemon=True)
                self._watcher.start()
        try:
            yield
        finally:
            with self._lock:
                del self._under_way[id(reward)]

    def _watch(self) -> None:
        slow_s = SLOW_S if self._slow_s is None else self._slow_s
        while True:
            time.sleep(slow_s / 10)
            with self._lock:
                if not self._under_way:
                    self._watcher = None
                    return
                slow = [r for r in self._under_way.values() if time.monotonic() - r.began >= slow_s]
            if slow:
                logger.warning("%s", _sentence(min(slow, key=lambda reward: reward.began), len(slow)))
                time.sleep(slow_s)


_slow = SlowRewards()


def _sentence(reward: _Reward, count: int) -> str:
    more = f", and {count - 1} more are as slow" if count > 1 else ""
    place, blocks = _whereabouts(reward)
    end = (
        "it blocks the event loop, where no deadline can end it: await what it waits for, or make it a plain function, "
        "which gets a thread of its own"
        if blocks
        else f"it times out after {reward.limit_s:g} s (--reward-timeout)"
    )
    return (
        f"the reward of samples {list(reward.indices)} ({reward.name}) has been pending for "
        f"{time.monotonic() - reward.began:.0f} s{place}{more}; {end}"
    )


def _whereabouts(reward: _Reward) -> tuple[str, bool]:
    """Return the line that the function is at ("" if it awaits something: it is in no thread), and if it blocks."""
    code = getattr(reward.function, "__code__", None)
    for thread, top in sys._current_frames().items():
        frame: FrameType | None = top
        while frame is not None and code is not None:
            if frame.f_code is code:
                return f", at {frame.f_code.co_filename}:{frame.f_lineno}", thread == reward.event_loop
            frame = frame.f_back
    return "", False
