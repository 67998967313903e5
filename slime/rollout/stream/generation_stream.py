"""The scheduler of the fully asynchronous rollout: which group starts when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from slime.rollout import sglang_rollout
from slime.rollout.cancelling import cancel_all
from slime.rollout.data_source import draw_groups
from slime.rollout.filter_hub.base_types import await_dynamic_filter, call_dynamic_filter
from slime.rollout.groups import Group, copy_group, has_aborted, is_complete
from slime.rollout.hooks.hook import find_hook
from slime.rollout.requests.generate_state import request_limit
from slime.rollout.requests.request_slots import RequestSlots
from slime.rollout.staleness import StalenessBound, stamp_steps, weight_clock, with_all_steps
from slime.rollout.stream.group_job import GroupJob
from slime.rollout.stream.group_ledger import GroupLedger
from slime.utils.http_utils import get_http_client

_STEPS_TO_THE_SLOTS = 3
"""Turns of the event loop after which the samples of a new group hold a slot or wait for one."""


class GenerationStream:
    """Begins groups as slots become free and ``--max-staleness`` allows, and queues those that finish.

    At most ``concurrency`` groups are in flight, and none begins while as many are completed. Everything runs on one
    event loop, but for ``wake`` and what is read of the ledger's ``completed``.
    """

    def __init__(self, args: Any, data_source: Any, concurrency: int | None = None) -> None:
        self.args = args
        self.data_source = data_source
        self.concurrency = concurrency or request_limit(args)
        self.clock = weight_clock()
        self.bound = StalenessBound(args.max_staleness, args.rollout_batch_size)
        self.ledger = GroupLedger(args, self.bound, self.clock, self._give_back)
        self._filter = find_hook(args, "dynamic_sampling_filter_path")
        self._no_prompts = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._filler: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._change = asyncio.Event()
        self._forget_clock: Callable[[], None] | None = None
        self._slots: RequestSlots | None = None

    # Start and stop

    def start(self) -> None:
        """Begin to generate (on the running loop); nothing happens when that was done already."""
        semaphore = sglang_rollout.GenerateState(self.args).semaphore
        self._slots = semaphore if isinstance(semaphore, RequestSlots) else None  # None: a plug-in's own
        if self._slots is not None:
            self._slots.changed = self._room.set
        if self._filler is not None and not self._filler.done():
            return
        self._loop = asyncio.get_running_loop()
        if self._forget_clock is None:
            self._forget_clock = self.clock.listen(self.wake)
        self._room.set()
        self._filler = self._loop.create_task(self._keep_filling(), name="fully-async-filler")

    async def suspend(self) -> None:
        """Stop generating; groups in flight are aborted on the engines and wait to be restarted."""
        tasks = self.ledger.put_back()  # first: results of cancelled tasks are dropped
        if self._filler is not None:
            tasks.append(self._filler)
            self._filler = None
        await cancel_all(tasks)
        await get_http_client().drain_aborts()

    async def stop(self) -> list[Group]:
        """Stop for good; return the groups that were not consumed, in the order in which they were drawn."""
        await self.suspend()
        if self._forget_clock is not None:
            self._forget_clock()
            self._forget_clock = None
        self.ledger.given_back.clear()  # the data source has them
        left = self.ledger.unconsumed()
        self.ledger.waiting.clear()
        self.ledger.completed.take()
        return left

    def wake(self) -> None:
        """Check again, from any thread, whether groups can start and rollouts continue."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._notice)

    def _notice(self) -> None:
        self._room.set()
        self._change.set()

    # Consuming

    def begin_rollout(self, rollout_id: int) -> None:
        """Start to consume a rollout: what is too old for it is restarted at once."""
        sglang_rollout.GenerateState(self.args).rollout_id = rollout_id
        self._no_prompts = False
        for task in self.ledger.begin_rollout(rollout_id):
            task.cancel()
        self.start()
        self._room.set()

    def take(self, target: int) -> int:
        """Take completed groups until ``target`` are taken; return how many more. Raises what stops the run."""
        failure, self.ledger.failure = self.ledger.failure, None  # another call is another attempt
        if failure is not None:
            raise failure
        more = self.ledger.take(target)
        self._room.set()
        return more

    def end_rollout(self, dropped: int) -> dict[str, Any]:
        """Forget the groups taken and the oldest ``dropped`` that the filter dropped; return the metrics since the
        last end."""
        state = sglang_rollout.GenerateState(self.args)
        metrics = self.ledger.end_rollout(dropped)
        metrics |= state.reward_errors.metrics()
        if self._slots is not None:
            metrics |= self._slots.metrics()
        state.reward_errors.count_anew()
        self._room.set()
        return metrics

    @property
    def is_exhausted(self) -> bool:
        """True when the data source has no more prompts and nothing is on its way."""
        ledger = self.ledger
        return self._no_prompts and not ledger.in_flight and not ledger.waiting and not len(ledger.completed)

    async def wait_for_change(self, timeout_s: float) -> bool:
        """Wait until a group began or ended, new weights came, or ``wake``; return False when nothing does in time."""
        try:
            await asyncio.wait_for(self._change.wait(), timeout_s)
        except TimeoutError:
            return False
        self._change.clear()
        return True

    def describe_oldest(self, count: int = 3) -> str:
        """Name the groups that have been in flight longest."""
        now = time.monotonic()
        oldest = sorted(self.ledger.in_flight.values(), key=lambda job: job.started)[:count]
        return ", ".join(f"{job.name()} for {now - job.started:.0f} s" for job in oldest)

    # Beginning

    async def _keep_filling(self) -> None:
        while True:
            await self._room.wait()
            self._room.clear()
            try:
                while self._may_begin() and self._begin_next():
                    for _ in range(_STEPS_TO_THE_SLOTS):
                        await asyncio.sleep(0)
            except Exception as e:  # noqa: BLE001  (raised by the rollout that waits)
                self.ledger.stop_with(e)
                self._change.set()

    def _may_begin(self) -> bool:
        ledger = self.ledger
        if ledger.failure is not None or (self._no_prompts and not ledger.waiting):
            return False
        if len(ledger.in_flight) >= self.concurrency or len(ledger.completed) >= self.concurrency:
            return False
        if self._slots is not None and self._slots.waiting >= max(1, self.args.n_samples_per_prompt):
            return False
        return self.bound.may_start(ledger.ahead, ledger.rollout_id, self.clock.step)

    def _begin_next(self) -> bool:
        """Begin the next group; False when there is none."""
        ledger = self.ledger
        if not ledger.waiting:
            ledger.add(draw_groups(self.args, self.data_source.get_samples, 1))
        if not ledger.waiting:
            self._no_prompts = True
            self._change.set()
            return False
        job = ledger.waiting.popleft()
        try:
            self._begin(job)
        except Exception as e:  # noqa: BLE001  (what the filter raises costs no group, as while it is generated)
            ledger.fail(job, e)
        self._change.set()
        return True

    def _begin(self, job: GroupJob) -> None:
        ledger = self.ledger
        job.step, job.started = self.clock.step, time.monotonic()
        ledger.forget_too_old(job)
        if is_complete(job.original):
            # It comes from before a restart, where the filter may have been against it.
            ledger.finish(job, job.original, call_dynamic_filter(self._filter, self.args, job.original))
            return
        task = asyncio.get_running_loop().create_task(self._generate(job), name=f"fully-async {job.name()}")
        ledger.in_flight[task] = job
        task.add_done_callback(self._ended)

    async def _generate(self, job: GroupJob) -> tuple[Group, Any]:
        """Return the finished group and the dynamic filter's verdict on it, None for one that was aborted."""
        state = sglang_rollout.GenerateState(self.args)
        group = await sglang_rollout.generate_and_rm_group(
            self.args, copy_group(job.original), state.sampling_params.copy(), evaluation=False
        )
        expected = self.args.n_samples_per_prompt
        assert len(group) == expected, f"{job.name()} came back with {len(group)} samples, expected {expected}"
        if has_aborted(group):
            return group, None
        stamp_steps(group, self.clock, job.step)
        verdict = await await_dynamic_filter(self._filter, self.args, group)
        if record := getattr(self.data_source, "record_completed", None):
            record(with_all_steps(group, self.clock))
        return group, verdict

    def _give_back(self, group: Group) -> bool:
        source = self.data_source
        if not hasattr(source, "add_samples") or not getattr(source, "accepts_samples", True):
            return False
        source.add_samples([group])
        self._no_prompts = False
        return True

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """The callback of every task; it only sorts, and waits for nothing."""
        job = self.ledger.in_flight.pop(task, None)
        stray = RuntimeError("cancelled unexpectedly")  # a group that was cancelled here is not in flight any more
        error = stray if task.cancelled() else task.exception()
        if job is None:
            return
        if error is not None:
            self.ledger.fail(job, error)
        else:
            group, verdict = task.result()
            if verdict is None:
                self.ledger.abort(job, group)
            else:
                self.ledger.finish(job, group, verdict)
        self._notice()
