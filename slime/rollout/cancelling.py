"""Cancelling groups of tasks, with a bound on how long that may take."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 5.0
"""Time in which tasks have to end once they were cancelled; shorter than an interrupted rollout may take for that."""

_cancelled: WeakSet[asyncio.Task[Any]] = WeakSet()
_waits_for: WeakKeyDictionary[asyncio.Task[Any], list[asyncio.Task[Any]]] = WeakKeyDictionary()
"""The tasks that a task which cancels waits for."""


async def gather_or_cancel(coros: list[Any]) -> list[Any]:
    """Run coroutines concurrently and return their results in order; the first failure cancels the others.

    One of them that is cancelled while the caller is not is a failure: RuntimeError.
    """
    tasks = [asyncio.ensure_future(coro) for coro in coros]
    results = asyncio.gather(*tasks)
    results.add_done_callback(_drop)
    try:
        return await asyncio.shield(results)  # a caller that is cancelled waits no longer than the grace
    except asyncio.CancelledError as e:
        if caller_is_cancelled():
            raise
        raise RuntimeError("a task was cancelled unexpectedly") from e
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    """Cancel the tasks that are not done and wait ``CANCEL_GRACE_S`` for them to end; results and errors are dropped.

    Those that do not end in time are abandoned, with a warning, and returned: their arguments may still change and must
    not be used.
    """
    tasks = list(tasks)
    for task in tasks:
        if task.done():
            _drop(task)
        else:
            task.add_done_callback(_drop)
            _cancelled.add(task)
            task.cancel()
    running = [task for task in tasks if not task.done()]
    if not running:
        return set()
    caller = asyncio.current_task()
    assert caller is not None
    _waits_for[caller] = running
    try:
        _, late = await asyncio.wait(running, timeout=CANCEL_GRACE_S)
        if late and caller not in _cancelled:  # else who cancelled the caller says it
            logger.warning(
                "cancelled, and not ended %g s later: %s. Its result is ignored. It is %s",
                CANCEL_GRACE_S, ", ".join(sorted(task.get_name() for task in late)),
                "; ".join(sorted({place for task in late for place in _places(task)})),
            )  # fmt: skip
        return late
    finally:
        _waits_for.pop(caller, None)


def caller_is_cancelled() -> bool:
    """True when the current task was cancelled from outside."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop on this thread
        return False
    return task is not None and task.cancelling() > 0


def end_if_cancelled() -> None:
    """Raise CancelledError in a task that ``cancel_all`` cancelled: what it awaited has kept that to itself."""
    if asyncio.current_task() in _cancelled:
        raise asyncio.CancelledError


def _drop(task: asyncio.Future[Any]) -> None:
    """Look at its error, which the event loop reports otherwise."""
    if not task.cancelled():
        task.exception()


def _places(task: asyncio.Task[Any]) -> Iterator[str]:
    """Yield where a task, or each of those that it waits for the end of, is."""
    below = [one for one in _waits_for.get(task, ()) if not one.done()]
    for one in below:
        yield from _places(one)
    if not below:
        yield _place(task.get_coro())


def _place(coro: Any) -> str:
    """Name the function of a user that a suspended coroutine is in, with its file and line."""
    found = "in a function of its own"
    while (frame := getattr(coro, "cr_frame", None)) is not None:
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        if module != "asyncio":
            found = f"in {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
        if module not in ("asyncio", "slime"):
            break
        coro = coro.cr_await
    return found
