"""One background asyncio loop per process, on which synchronous code runs coroutines and waits for them."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLEANUP_GRACE_S = 10.0
"""Seconds that an interrupted coroutine may take to clean up before ``run`` stops waiting for it."""

_lock = threading.Lock()
_loop_thread: _LoopThread | None = None
_calls: set[_Call] = set()


class _LoopThread:
    """A daemon thread that runs an event loop forever."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        started = threading.Event()
        self.loop.call_soon(started.set)
        self.thread = threading.Thread(target=self._serve, name="slime-asyncio", daemon=True)
        self.thread.start()
        if not started.wait(10):
            raise RuntimeError("the background asyncio loop did not start within 10 s")

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


class _Call:
    """One coroutine in progress on the loop, and the exception that is to replace its result, if any."""

    def __init__(self, coro: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> None:
        self.coro = coro
        self.loop = loop
        self.task: asyncio.Task[Any] | None = None
        self.done = threading.Event()
        self.interruption: BaseException | None = None
        self.interrupted_at = 0.0

    def begin(self) -> None:
        """Start the coroutine."""
        self.loop.call_soon_threadsafe(self._start)

    def _start(self) -> None:
        self.task = self.loop.create_task(self.coro)
        self.task.add_done_callback(lambda _: self.done.set())
        if self.interruption is not None:
            self.task.cancel()

    def _cancel_task(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def interrupt(self, exc: BaseException) -> None:
        if self.interruption is None:
            self.interruption, self.interrupted_at = exc, time.monotonic()
            self.loop.call_soon_threadsafe(self._cancel_task)

    def wait(self) -> None:
        """Return once the task is done, or the clean-up grace after an interruption is over."""
        while not self.done.wait(0.5):
            if self.interruption is not None and time.monotonic() - self.interrupted_at > CLEANUP_GRACE_S:
                logger.warning(
                    "%s was interrupted (%r) and still has not finished after %.0f s; continuing without it",
                    getattr(self.coro, "__qualname__", self.coro),
                    self.interruption,
                    CLEANUP_GRACE_S,
                )
                return


def get_async_loop() -> asyncio.AbstractEventLoop:
    """Return the process's background loop, starting its thread on first use (and again after a fork)."""
    global _loop_thread
    with _lock:
        if _loop_thread is None or _loop_thread.pid != os.getpid():
            _loop_thread = _LoopThread()
        return _loop_thread.loop


def run(coro: Coroutine[Any, Any, T]) -> T:
    """Run ``coro`` on the background loop, block until it is done, and return its result.

    Its exceptions are raised here. KeyboardInterrupt and ``interrupt`` cancel it first. Raises RuntimeError when called
    from the loop's own thread, which would wait for itself: ``await`` the coroutine there.
    """
    loop = get_async_loop()
    if _loop_thread is not None and threading.current_thread() is _loop_thread.thread:
        coro.close()
        raise RuntimeError("async_utils.run() was called on the asyncio thread itself; await the coroutine there")
    call = _Call(coro, loop)
    with _lock:
        _calls.add(call)  # before it begins: it may be interrupted at once
    try:
        call.begin()
        try:
            call.wait()
        except BaseException as exc:  # raised in this thread: Ctrl-C, SIGTERM
            call.interrupt(exc)
            call.wait()
            raise
    finally:
        with _lock:
            _calls.discard(call)
    if call.interruption is not None:
        raise call.interruption
    assert call.task is not None
    return call.task.result()


def interrupt(exc: BaseException) -> int:
    """Make every ``run`` in progress in this process raise ``exc``; their coroutines are cancelled. Return how many."""
    with _lock:
        calls = list(_calls)
    for call in calls:
        call.interrupt(exc)
    return len(calls)
