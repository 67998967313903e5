"""A reward that hangs is named with its sample, its function and the line it is at."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from slime.rollout.rm_hub import async_rm, errors
from slime.rollout.rm_hub.errors import RewardErrors, SlowRewards
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args

pytestmark = pytest.mark.slow

HERE = __name__
SLOW_S = 0.2
release = threading.Event()


async def waits(args: Any, sample: Sample, **_: Any) -> float:
    await asyncio.sleep(60)
    return 1.0


def sleeps(args: Any, sample: Sample, **_: Any) -> float:
    release.wait(60)
    return 1.0


async def quick(args: Any, sample: Sample, **_: Any) -> float:
    return 1.0


async def blocks(args: Any, sample: Sample, **_: Any) -> float:
    time.sleep(1.0)
    return 1.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(errors, "_slow", SlowRewards(SLOW_S))
    release.clear()
    yield
    release.set()


async def score(name: str, timeout: float) -> Sample:
    sample = Sample(index=7, prompt="p", response="r")
    args = rollout_args(custom_rm_path=f"{HERE}.{name}", reward_timeout=timeout)
    await RewardErrors().score_one(args, sample, async_rm)
    return sample


def line_of(function: Any, text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "been pending" in r.getMessage()]


async def test_one_that_awaits_forever_is_named_and_given_up(caplog):
    began = time.monotonic()
    sample = await score("waits", 0.9)
    said = warnings(caplog)
    assert 1 <= len(said) <= (time.monotonic() - began) / SLOW_S
    assert said[0].startswith(f"the reward of samples [7] (--custom-rm-path '{HERE}.waits' (")
    assert said[0].endswith("; it times out after 0.9 s (--reward-timeout)")
    assert sample.remove_sample
    assert "--reward-timeout" in sample.metadata["reward_error"]


async def test_one_that_sleeps_in_its_thread_is_named_with_its_line(caplog):
    sample = await score("sleeps", 0.9)
    assert line_of(sleeps, "release.wait") in warnings(caplog)[0]
    assert sample.remove_sample


async def test_one_that_blocks_the_event_loop_is_named_though_nothing_else_runs(caplog):
    await score("blocks", 60.0)
    [first, *_] = warnings(caplog)
    assert line_of(blocks, "time.sleep") in first
    assert first.endswith("or make it a plain function, which gets a thread of its own")


async def test_many_make_one_message(caplog):
    began = time.monotonic()
    rewards = [asyncio.create_task(score("waits", 60.0)) for _ in range(20)]
    async with asyncio.timeout(30):
        while not any(", and 19 more are as slow;" in said for said in warnings(caplog)):
            await asyncio.sleep(SLOW_S / 10)
    assert len(warnings(caplog)) <= (time.monotonic() - began) / SLOW_S
    for reward in rewards:
        reward.cancel()
    await asyncio.gather(*rewards, return_exceptions=True)


async def test_quick_ones_are_not_named(caplog, monkeypatch):
    monkeypatch.setattr(errors, "_slow", SlowRewards(1.0))
    for _ in range(30):
        assert (await score("quick", 60.0)).reward == 1.0
        await asyncio.sleep(0.05)
    assert warnings(caplog) == []


def test_the_watcher_ends_when_there_is_nothing_to_watch():
    watch = SlowRewards(0.05)
    with watch.watching([1], 1.0, "x", None):
        assert watch._watcher is not None
    deadline = time.monotonic() + 5
    while watch._watcher is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert watch._watcher is None
