"""Plain functions are called in a thread; an awaitable that they return is awaited on the event loop."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import Any

import pytest

from slime.rollout.hooks.hook import Hook
from slime.utils.types import Sample


async def score(args: Any, sample: Sample, **kwargs: Any) -> float:
    await asyncio.sleep(0)
    return 0.5 + (sample.index or 0)


def returns_a_coroutine(args: Any, sample: Sample) -> Any:
    return score(args, sample)


def decorated_without_wraps(function: Any) -> Any:
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


class Callables:
    def __call__(self, args: Any, sample: Sample) -> Any:
        return score(args, sample)

    async def method(self, args: Any, sample: Sample) -> Any:
        return await score(args, sample)


COROUTINES = [
    score, returns_a_coroutine, decorated_without_wraps(score), functools.partial(score), Callables(),
    Callables().method,
]  # fmt: skip


@pytest.mark.parametrize("function", COROUTINES, ids=lambda f: getattr(f, "__name__", type(f).__name__))
async def test_a_coroutine_is_awaited_on_the_loop_wherever_it_was_made(function):
    assert await Hook("--flag", "a.b", function).awaited_off_loop(None, Sample(index=3)) == 3.5


def with_a_loop_of_its_own(args: Any, sample: Sample) -> Any:
    async def both() -> Any:
        await asyncio.gather(score(args, sample), score(args, sample))
        return threading.get_ident()

    return asyncio.run(both())


def with_a_new_loop(args: Any, sample: Sample) -> Any:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(asyncio.ensure_future(score(args, sample), loop=loop))
    loop.close()
    return threading.get_ident()


@pytest.mark.parametrize("function", [with_a_loop_of_its_own, with_a_new_loop])
async def test_a_plain_function_is_called_in_a_thread(function):
    assert await Hook("--flag", "a.b", function).awaited_off_loop(None, Sample()) != threading.get_ident()


def gathers(args: Any, sample: Sample) -> Any:
    coro = score(args, sample)
    try:
        return asyncio.gather(coro)
    finally:
        coro.close()


def asks_for_the_loop(args: Any, sample: Sample) -> Any:
    return asyncio.get_running_loop()


@pytest.mark.parametrize("function", [gathers, asks_for_the_loop])
async def test_the_error_of_a_plain_function_that_needs_the_loop_names_the_way_out(function):
    with pytest.raises(RuntimeError, match=r"no (running|current) event loop") as raised:
        await Hook("--flag", "a.b", function).awaited_off_loop(None, Sample())
    assert "make it `async def`" in raised.value.__notes__[0]
