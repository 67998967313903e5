"""Pieces of the state that the requests of one rollout process share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator
from typing import Any

from slime.rollout.base_types import iter_samples
from slime.rollout.group_copy import copy_group
from slime.utils.http_utils import get_rollout_num_engines
from slime.utils.types import Sample


def train_sampling_params(args: Any) -> dict[str, Any]:
    """Return the engines' sampling parameters for training rollouts."""
    params: dict[str, Any] = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if args.rollout_top_p != 1.0:
        params["custom_params"] = {"return_top_p_token_ids": True}
    return params


def request_limit(args: Any) -> int:
    """Return how many requests may be in flight: ``--sglang-server-concurrency`` per engine."""
    return max(1, int(args.sglang_server_concurrency) * max(1, get_rollout_num_engines(args)))


class GroupsInFlight:
    """Which task makes which group, since when, and what it was before."""

    def __init__(self) -> None:
        self._groups: dict[asyncio.Task[Any], tuple[list[Sample], float]] = {}
        self._originals: dict[asyncio.Task[Any], list[Sample]] = {}

    def add(self, task: asyncio.Task[Any], group: list[Sample]) -> None:
        self._groups[task] = (group, time.monotonic())
        self._originals[task] = copy_group(group)

    def take(self, task: asyncio.Task[Any]) -> list[Sample]:
        """Forget ``task`` and return the group it was started with, as it is now."""
        self._originals.pop(task)
        return self._groups.pop(task)[0]

    def take_original(self, task: asyncio.Task[Any]) -> list[Sample]:
        """Forget ``task`` and return the group it was started with, as it was then."""
        self._groups.pop(task)
        return self._originals.pop(task)

    def describe_oldest(self, count: int = 3) -> str:
        """Name the groups that have been in flight longest, and what each of their samples waits for."""
        now = time.monotonic()
        oldest = sorted(self._groups.values(), key=lambda entry: entry[1])[:count]
        return ", ".join(
            f"group_index={getattr(group[0], 'group_index', None)} for {now - since:.0f} s ({_waits(group)})"
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


def _waits(group: list[Sample]) -> str:
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
    """The rewards that are being computed, which a rollout that ends can give up."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._given_up: set[asyncio.Task[Any]] = set()

    async def wait_for(self, reward: Coroutine[Any, Any, Any]) -> None:
        """Run ``reward`` to its end, or until it is given up. Raises what it raises."""
        task = asyncio.get_running_loop().create_task(reward)
        self._tasks.add(task)
        try:
            await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if task not in self._given_up or (current is not None and current.cancelling()):
                raise
        finally:
            self._tasks.discard(task)
            self._given_up.discard(task)

    def give_up(self) -> None:
        """Cancel all; who waits for them goes on without."""
        self._given_up |= self._tasks
        for task in self._tasks:
            task.cancel()


@contextlib.contextmanager
def least_used(counts: list[int]) -> Iterator[int]:
    """Yield the index of the smallest count, which is one higher meanwhile."""
    chosen = min(range(len(counts)), key=counts.__getitem__)
    counts[chosen] += 1
    try:
        yield chosen
    finally:
        counts[chosen] -= 1


async def gather_or_cancel(coros: list[Any]) -> list[Any]:
    """Run coroutines concurrently and return their results in order; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(coro) for coro in coros]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Any) -> None:
    """Cancel the tasks that are not done and wait until all are; their results and errors are dropped."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
