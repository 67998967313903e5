"""Tasks that end together, and those that do not end."""

from __future__ import annotations

import asyncio

import pytest

from slime.rollout import cancelling
from slime.rollout.cancelling import cancel_all, end_if_cancelled, gather_or_cancel

DEADLINE_S = 60.0


class Stubborn:
    """A task's function that does not end on being cancelled until it may."""

    def __init__(self) -> None:
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def run(self) -> str:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await self.may_end.wait()
        return "late"


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(cancelling, "CANCEL_GRACE_S", 0.05)


async def forever() -> None:
    await asyncio.Event().wait()


async def fails(after: asyncio.Event) -> None:
    await after.wait()
    raise ValueError("no")


async def stray() -> None:
    task = asyncio.create_task(forever())
    asyncio.get_running_loop().call_soon(task.cancel)
    await task


async def test_results_are_in_order_and_the_first_failure_cancels_the_others():
    assert await gather_or_cancel([asyncio.sleep(0, result=i) for i in range(3)]) == [0, 1, 2]
    assert await gather_or_cancel([]) == []
    other, now = asyncio.create_task(forever()), asyncio.Event()
    now.set()
    with pytest.raises(ValueError, match="no"):
        await gather_or_cancel([other, fails(now)])
    assert other.cancelled()


async def test_a_task_that_does_not_end_is_left_alone_with_a_warning(caplog):
    hook = Stubborn()
    stubborn = asyncio.create_task(hook.run(), name="group 7")
    quick, done = asyncio.create_task(forever(), name="group 8"), asyncio.create_task(asyncio.sleep(0))
    await done
    await hook.begun.wait()
    assert await asyncio.wait_for(cancel_all([stubborn, quick, done]), DEADLINE_S) == {stubborn}
    assert quick.cancelled()
    (record,) = caplog.records
    for said in ("0.05 s", "group 7", "Stubborn.run (", "test_cancelling.py:"):
        assert said in record.message
    assert "group 8" not in record.message
    hook.may_end.set()
    assert await stubborn == "late"
    assert await cancel_all([stubborn]) == set()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("how", ["failure", "cancellation"])
async def test_a_failure_and_a_cancellation_do_not_wait_for_what_does_not_end(how, caplog):
    hook = Stubborn()
    fail_when = hook.begun if how == "failure" else asyncio.Event()
    gathering = asyncio.create_task(gather_or_cancel([hook.run(), fails(fail_when)]))
    await hook.begun.wait()
    if how == "cancellation":
        gathering.cancel()
    with pytest.raises(ValueError if how == "failure" else asyncio.CancelledError):
        await asyncio.wait_for(gathering, DEADLINE_S)
    (record,) = caplog.records
    assert "Stubborn.run (" in record.message
    hook.may_end.set()


async def test_who_is_within_the_group_is_named_once(caplog):
    hook = Stubborn()
    group = asyncio.create_task(gather_or_cancel([gather_or_cancel([hook.run()])]), name="group 3")
    await hook.begun.wait()
    assert await cancel_all([group]) == {group}
    hook.may_end.set()
    await asyncio.wait([group])
    (record,) = caplog.records
    for said in ("group 3", "Stubborn.run ("):
        assert said in record.message


async def test_a_cancellation_from_within_is_a_failure():
    other = asyncio.create_task(forever())
    with pytest.raises(RuntimeError, match="cancelled unexpectedly"):
        await asyncio.wait_for(gather_or_cancel([other, stray()]), DEADLINE_S)
    assert other.cancelled()


async def test_what_keeps_a_cancellation_to_itself_can_be_found_out():
    async def swallows() -> str:
        with pytest.raises(asyncio.CancelledError):
            await forever()
        end_if_cancelled()
        return "went on"

    task = asyncio.create_task(swallows())
    await asyncio.sleep(0)
    assert await cancel_all([task]) == set()
    assert task.cancelled()
    end_if_cancelled()  # this task was not
