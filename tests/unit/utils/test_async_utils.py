"""The shared background loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from slime.utils import async_utils
from slime.utils.async_utils import get_async_loop, interrupt, run


async def value(x: int) -> int:
    await asyncio.sleep(0)
    return x


async def fail() -> None:
    raise KeyError("inner")


async def nested() -> None:
    coro = value(1)
    try:
        run(coro)
    finally:
        coro.close()


def test_results_and_errors_are_returned():
    assert run(value(3)) == 3
    with pytest.raises(KeyError, match="inner"):
        run(fail())


def test_calls_from_several_threads_share_the_loop():
    seen: list[asyncio.AbstractEventLoop] = []

    async def wait_for_the_others() -> None:
        seen.append(asyncio.get_running_loop())
        while len(seen) < 4:
            await asyncio.sleep(0.01)

    threads = [threading.Thread(target=lambda: run(wait_for_the_others()), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert len(seen) == 4
    assert set(seen) == {get_async_loop()}


def test_a_call_from_the_loop_itself_is_refused():
    with pytest.raises(RuntimeError, match="await the coroutine"):
        run(nested())


def test_interrupt_cancels_what_is_running_and_raises_its_reason():
    cleaned: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append("yes")

    timer = threading.Timer(0.1, lambda: interrupt(RuntimeError("engine 3 died")))
    timer.start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="engine 3 died"):
        run(wait())
    timer.join()
    assert cleaned == ["yes"]
    assert time.monotonic() - began < 30
    assert run(value(1)) == 1
    assert interrupt(RuntimeError("nobody")) == 0


def test_a_coroutine_that_will_not_end_is_left_behind(monkeypatch):
    monkeypatch.setattr(async_utils, "CLEANUP_GRACE_S", 0.1)
    release = threading.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    threading.Timer(0.05, lambda: interrupt(RuntimeError("stop"))).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="stop"):
        run(stubborn())
    assert time.monotonic() - began < 30
    release.set()


def test_interrupt_before_the_task_starts_still_wins():
    blocker = threading.Event()
    get_async_loop().call_soon_threadsafe(blocker.wait, 5)
    result: list[BaseException] = []

    def call() -> None:
        try:
            run(value(1))
        except RuntimeError as e:
            result.append(e)

    thread = threading.Thread(target=call)
    thread.start()
    deadline = time.monotonic() + 5
    while interrupt(RuntimeError("early")) == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    blocker.set()
    thread.join(5)
    assert [str(e) for e in result] == ["early"]


def test_a_coroutine_can_be_interrupted_by_the_first_that_it_tells_of_itself():
    for _ in range(20):  # who is interrupted runs before ``run`` continues, or after

        async def tell() -> None:
            assert interrupt(KeyError("told")) == 1
            await asyncio.sleep(60)

        with pytest.raises(KeyError, match="told"):
            run(tell())
