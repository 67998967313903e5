"""Functions that may be coroutine functions or not: calling them where they block, and where they must not."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from slime.utils.async_utils import run


def finish(result: Any) -> Any:
    """Return ``result``, awaited if it can be, blocking until it is there.

    On the thread of an event loop, which cannot wait for itself, another loop awaits it.
    """
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run(wait())
    return asyncio.run_coroutine_threadsafe(wait(), _second_loop()).result()


@functools.cache
def _second_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="slime-asyncio-hooks", daemon=True).start()
    return loop


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Await ``function(*args, **kwargs)`` in a daemon thread: one that hangs keeps neither its waiter nor the exit.

    Unlike those of a pool, threads that call hooks which need a thread themselves never wait for each other.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
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


def caller_is_cancelled() -> bool:
    """True when somebody cancelled the task that runs now."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop on this thread
        return False
    return task is not None and task.cancelling() > 0


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
