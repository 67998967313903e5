"""Calling functions that may be coroutine functions or plain ones."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from slime.utils.async_utils import run


def finish(result: Any) -> Any:
    """Return ``result``, awaited if it can be, blocking until it is there.

    On the thread of an event loop, which cannot wait for itself, a loop in another thread awaits it.
    """
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run(wait())
    answer: Future[Any] = Future()

    def work() -> None:
        try:
            answer.set_result(asyncio.run(wait()))
        except BaseException as e:  # noqa: BLE001  (raised again where it is awaited)
            answer.set_exception(e)

    # A daemon: a hook that hangs does not keep the process from its exit.
    threading.Thread(target=work, name="slime-asyncio-hook", daemon=True).start()
    return answer.result()


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Await ``function(*args, **kwargs)`` in a daemon thread: one that hangs keeps neither its waiter nor the exit.

    Unlike those of a pool, threads that call hooks which need a thread themselves never wait for each other.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # the caller was cancelled
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, StopIteration):  # a future does not take it
            future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(function, *args, **kwargs)
        except BaseException as e:  # noqa: BLE001  (raised again where it is awaited)
            error = e
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=f"hook-{getattr(function, '__name__', '')}", daemon=True).start()
    return await future


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """True for coroutine functions, also wrapped, partial, or as the ``__call__`` of an object."""
    function = innermost(function)
    if inspect.iscoroutinefunction(function):
        return True
    return not inspect.isroutine(function) and inspect.iscoroutinefunction(type(function).__call__)


def innermost(function: Any) -> Any:
    """Return the function within decorators and partial calls."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    return function
