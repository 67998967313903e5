"""Plain functions that return tasks and futures are called on the event loop, others in a thread."""

from __future__ import annotations

import asyncio
import asyncio as aio
import functools
import threading
from asyncio import ensure_future
from collections.abc import Awaitable
from typing import Any

import pytest

from slime.rollout.hooks.custom_generate import call_generate
from slime.rollout.hooks.hook import Hook
from slime.rollout.hooks.needs_loop import needs_loop
from slime.utils.types import Sample


async def score(args: Any, sample: Sample, **kwargs: Any) -> float:
    await asyncio.sleep(0)
    return 0.5 + (sample.index or 0)


def gathered(args: Any, samples: list[Sample], **kwargs: Any) -> Any:
    return asyncio.gather(*[score(args, sample) for sample in samples])


def as_task(args: Any, sample: Sample, **kwargs: Any) -> Any:
    return asyncio.get_running_loop().create_task(score(args, sample))


def under_another_name(args: Any, sample: Sample) -> Any:
    return aio.shield(score(args, sample))


def imported_by_name(args: Any, sample: Sample) -> Any:
    return ensure_future(score(args, sample))


def imported_within(args: Any, sample: Sample) -> Any:
    from asyncio import create_task

    return create_task(score(args, sample))


def in_an_executor(args: Any, sample: Sample) -> Any:
    loop = asyncio.get_running_loop()
    return loop.run_in_executor(None, lambda: 0.5 + (sample.index or 0))


def spawn(coroutine: Any) -> Any:
    return asyncio.create_task(coroutine)


def with_a_helper(args: Any, sample: Sample) -> Any:
    return spawn(score(args, sample))


def decorated_without_wraps(function: Any) -> Any:
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def annotated(args: Any, sample: Sample) -> Awaitable[float]:
    return getattr(asyncio, "ensure" + "_future")(score(args, sample))


class Callables:
    def __call__(self, args: Any, sample: Sample) -> Any:
        return asyncio.create_task(score(args, sample))

    def method(self, args: Any, sample: Sample) -> Any:
        return spawn(score(args, sample))


NEED_IT = [
    as_task, under_another_name, imported_by_name, imported_within, in_an_executor, with_a_helper, annotated,
    decorated_without_wraps(as_task), functools.partial(as_task), Callables(), Callables().method,
]  # fmt: skip


@pytest.mark.parametrize("function", NEED_IT, ids=lambda f: getattr(f, "__name__", type(f).__name__))
async def test_what_makes_a_task_is_called_on_the_loop(function):
    assert needs_loop(function)
    assert await Hook("--flag", "a.b", function).awaited_off_loop(None, Sample(index=3)) == 3.5


async def test_a_batch_of_tasks():
    rewards = await Hook("--flag", "a.b", gathered).awaited_off_loop(None, [Sample(index=1), Sample(index=2)])
    assert list(rewards) == [1.5, 2.5]


class Tensor:
    def gather(self, *args: Any) -> int:
        return threading.get_ident()


def gathers_of_a_tensor(args: Any, sample: Sample) -> Any:
    return Tensor().gather(-1, 0)


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


@pytest.mark.parametrize("function", [gathers_of_a_tensor, with_a_loop_of_its_own, with_a_new_loop])
async def test_what_may_block_is_called_in_a_thread(function):
    assert not needs_loop(function)
    assert await Hook("--flag", "a.b", function).awaited_off_loop(None, Sample()) != threading.get_ident()


def only_a_coroutine(args: Any, sample: Sample) -> Any:
    return score(args, sample)


@pytest.mark.parametrize("function", [only_a_coroutine, score, len, Sample, functools.partial(score, None)])
def test_what_needs_no_loop_when_it_is_called(function):
    assert not needs_loop(function)


async def test_a_coroutine_made_in_a_thread_is_awaited_on_the_loop():
    assert await Hook("--flag", "a.b", only_a_coroutine).awaited_off_loop(None, Sample(index=3)) == 3.5


async def finished(sample: Sample) -> Sample:
    sample.response = "done"
    return sample


def generates_in_a_task(args: Any, sample: Sample, sampling_params: Any) -> Any:
    return asyncio.create_task(finished(sample))


async def test_a_generate_function_that_returns_a_task_gets_the_sample_itself():
    sample = Sample(index=1)
    assert await call_generate(generates_in_a_task, None, sample, {}, evaluation=False) is sample
    assert sample.response == "done"


def hidden(args: Any, sample: Sample) -> Any:
    return getattr(asyncio, "get_running" + "_loop")()


async def test_one_that_is_not_seen_to_need_the_loop_says_the_way_out():
    with pytest.raises(RuntimeError, match="no running event loop") as raised:
        await Hook("--flag", "a.b", hidden).awaited_off_loop(None, Sample())
    assert "make it `async def`, or annotate that it returns an Awaitable" in raised.value.__notes__[0]
