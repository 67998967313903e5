"""Pieces of the state that the requests of one rollout process share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any

from slime.rollout.cancelling import cancel_all
from slime.rollout.groups import FINISHED, copy_group, iter_samples, note_prompt
from slime.rollout.requests.engines import num_engines_asked
from slime.rollout.requests.top_p_mask import replays_top_p, top_k
from slime.rollout.rm_hub.errors import RewardErrors
from slime.rollout.rm_hub.failure import LateFailures
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def train_sampling_params(args: Any) -> dict[str, Any]:
    """Return the engines' sampling parameters for training rollouts."""
    params: dict[str, Any] = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": top_k(args),
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if replays_top_p(args):
        params["custom_params"] = {"return_top_p_token_ids": True}
    return params


def request_limit(args: Any) -> int:
    """Return how many requests may be in flight: ``--sglang-server-concurrency`` per engine."""
    return max(1, int(args.sglang_server_concurrency) * max(1, num_engines_asked(args)))


class PromptTokens:
    """Token ids of the latest prompts: the samples of a group, which begin together, have the same one."""

    KEPT = 16

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._ids: dict[str, list[int]] = {}

    def of(self, tokenizer: Any, prompt: str) -> list[int]:
        """Return the token ids of ``prompt``, a list of the caller's own."""
        if tokenizer is not self._tokenizer:
            self._tokenizer, self._ids = tokenizer, {}
        if prompt not in self._ids:
            if len(self._ids) >= self.KEPT:
                del self._ids[next(iter(self._ids))]
            self._ids[prompt] = tokenizer.encode(prompt, add_special_tokens=False)
        return list(self._ids[prompt])


class GroupsInFlight:
    """Which task makes which group, since when, what it was before, and what has come of its samples."""

    def __init__(self) -> None:
        self._groups: dict[asyncio.Task[Any], tuple[list[Sample], float]] = {}
        self._originals: dict[asyncio.Task[Any], list[Any]] = {}
        self._ended: dict[asyncio.Task[Any], dict[int, Any]] = {}

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(list(self._groups))

    def add(self, task: asyncio.Task[Any], group: list[Sample]) -> None:
        self._groups[task] = (group, time.monotonic())
        self._originals[task] = copy_group(group)
        self._ended[task] = {}

    def note_result(
        self, group_task: asyncio.Task[Any] | None, number: int, sample: Any, task: asyncio.Future[Any]
    ) -> None:
        """Remember what ``task`` made of one sample of a group that is in flight; late results are dropped.

        A cancelled sample keeps what was generated of it, unless it was finished: then sample hooks may have been left
        halfway. One whose generation failed starts again as it was drawn.
        """
        result = sample
        if not task.cancelled():
            if task.exception() is not None:
                return
            result = task.result()
            note_prompt(result, sample)
        elif isinstance(sample, list) or sample.status in FINISHED:
            return
        if group_task in self._ended:
            self._ended[group_task][number] = result

    def original(self, task: asyncio.Task[Any]) -> list[Any]:
        """Return the group ``task`` was started with, as it was then."""
        return self._originals[task]

    def take_original(self, task: asyncio.Task[Any]) -> list[Any]:
        """Forget ``task`` and return the group it was started with, as it was then."""
        self._groups.pop(task)
        self._ended.pop(task)
        return self._originals.pop(task)

    def take_unfinished(self, task: asyncio.Task[Any]) -> list[Any]:
        """Forget ``task`` and return its group with what came of its samples; those whose generation failed, or does
        not end, are as they were drawn."""
        ended = self._ended[task]
        return [ended.get(number, item) for number, item in enumerate(self.take_original(task))]

    def describe_oldest(self, count: int = 3) -> str:
        """Name the groups that have been in flight longest, and what each of their samples waits for."""
        now = time.monotonic()
        oldest = sorted(self._groups.values(), key=lambda entry: entry[1])[:count]
        return ", ".join(
            f"group_index={getattr(group[0], 'group_index', None)} for {now - since:.0f} s ({describe_waits(group)})"
            for group, since in oldest
        )


_WAITS_FOR = {
    "sglang_generate": "an engine",
    "reward_model": "its reward",
    "group_reward_model": "the reward of the group",
    "generate_and_rm": "a free slot or its generate function",
    "generate_and_rm_group": "the others of its group",
}
"""What a sample waits for, by the innermost span of its trace that is open."""


def describe_waits(group: list[Sample]) -> str:
    """Say what each of the samples waits for."""
    waiting: dict[str, list[int | None]] = {}
    for sample in iter_samples(group):
        if (span := _open_span(sample)) is not None:
            waiting.setdefault(_WAITS_FOR.get(span, span), []).append(sample.index)
    return ", ".join(f"samples {indices} wait for {what}" for what, indices in waiting.items()) or "no trace"


def _open_span(sample: Sample) -> str | None:
    open_spans: dict[Any, str] = {}
    for event in (getattr(sample, "trace", None) or {}).get("events", ()):
        if event["type"] == "span_start":
            open_spans[event["span_id"]] = event["name"]
        elif event["type"] == "span_end":
            open_spans.pop(event["span_id"], None)
    return list(open_spans.values())[-1] if open_spans else None


class PendingRewards:
    """The rewards that are being computed. A rollout that ends leaves them pending; the next one that gets the same
    samples waits for them instead of computing them twice.
    """

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Task[Any], asyncio.Future[None]] = {}
        self._by_sample: dict[int, asyncio.Task[Any]] = {}
        self._leaving = False
        self._left: asyncio.Future[None] | None = None
        """Done when callers are to stop waiting."""

    def __len__(self) -> int:
        """How many samples have a reward on its way."""
        return len(self._by_sample)

    def begin(self) -> None:
        """Let callers wait for rewards from now on."""
        self._leaving, self._left = False, None

    def leave(self) -> None:
        """Let callers that wait for a reward, now or until ``begin``, continue without it."""
        self._leaving = True
        for waiter in (*self._waiters.values(), self._left):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    async def wait_for(self, reward: Coroutine[Any, Any, Any], samples: Iterable[Sample]) -> None:
        """Run ``reward``, which sets the rewards of ``samples``, to its end, or until it is left behind.

        Raises what it raises. A caller that is cancelled cancels the reward too.
        """
        loop = asyncio.get_running_loop()
        samples = list(samples)
        task = loop.create_task(reward)
        waiter = self._waiters[task] = loop.create_future()
        self._by_sample.update((id(sample), task) for sample in samples)
        task.add_done_callback(functools.partial(self._ended, samples))  # which keeps the samples, and their ids, alive
        if self._leaving:
            waiter.set_result(None)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                await cancel_all([task])
            raise
        if task.done():
            task.result()

    async def catch_up(self, samples: Iterable[Sample]) -> bool:
        """Wait for the pending rewards of ``samples``; the caller computes those that failed again.

        Returns False when they are left behind once more.
        """
        tasks = {task for sample in samples if (task := self._by_sample.get(id(sample))) is not None}
        if tasks and self._left is None:
            self._left = asyncio.get_running_loop().create_future()
        while tasks and self._left is not None and not self._leaving:
            await asyncio.wait({*tasks, self._left}, return_when=asyncio.FIRST_COMPLETED)
            tasks = {task for task in tasks if not task.done()}
        return not tasks

    def _ended(self, samples: list[Sample], task: asyncio.Task[Any]) -> None:
        for sample in samples:
            self._by_sample.pop(id(sample), None)
        waiter = self._waiters.pop(task)
        error = None if task.cancelled() else task.exception()
        if not waiter.done():
            waiter.set_result(None)
        elif error is not None:
            logger.warning("a reward that its rollout did not wait for failed, and is asked for again: %r", error)


@contextlib.contextmanager
def least_used(counts: list[int]) -> Iterator[int]:
    """Yield the index of the smallest count, which is one higher meanwhile."""
    chosen = min(range(len(counts)), key=counts.__getitem__)
    counts[chosen] += 1
    try:
        yield chosen
    finally:
        counts[chosen] -= 1


class Completions:
    """The tasks of a growing set as they are done. A wait looks at their set, but not at each, as ``asyncio.wait`` does
    twice."""

    def __init__(self) -> None:
        self._watched: set[asyncio.Task[Any]] = set()
        self._done: set[asyncio.Task[Any]] = set()
        self._some = asyncio.Event()

    async def wait(self, tasks: set[asyncio.Task[Any]], timeout_s: float) -> set[asyncio.Task[Any]]:
        """Return those of ``tasks`` that are done, for the caller to take out; none when none is within the time."""
        for task in tasks - self._watched - self._done:
            self._watched.add(task)
            task.add_done_callback(self._note)
        try:
            async with asyncio.timeout(timeout_s):
                while not (done := self._done & tasks):
                    self._some.clear()
                    await self._some.wait()
        except TimeoutError:
            return set()
        self._done.clear()
        return done

    def _note(self, task: asyncio.Task[Any]) -> None:
        self._watched.discard(task)
        self._done.add(task)
        self._some.set()


class Bookkeeping:
    """Which rollout and evaluation are made, their rewards, and their groups in flight."""

    def __init__(self, args: Any = None) -> None:
        self.rollout_id: int | None = None
        self.reward_errors = RewardErrors(args)
        self.eval_rollout_id: int | None = None
        self.eval_reward_errors = RewardErrors()
        self.pending_rewards = PendingRewards()
        self.late_failures = LateFailures()
        self.prompt_tokens = PromptTokens()
        self.groups_in_flight = GroupsInFlight()


@functools.cache
def _of_stand_ins() -> Bookkeeping:
    return Bookkeeping()


def bookkeeping_of(state: Any) -> Bookkeeping:
    """Return the bookkeeping of ``state``: itself, or the one that all replacements in this process share."""
    return state if isinstance(state, Bookkeeping) else _of_stand_ins()
