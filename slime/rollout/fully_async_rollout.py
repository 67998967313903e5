"""Generation that never stops: groups are made across rollouts and weight syncs, each rollout takes what is ready.

For ``train_async.py``: ``--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async``.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slime.arguments.args import Args
from slime.rollout import sglang_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import draw_groups, hand_back
from slime.rollout.filter_hub.base_types import MetricGatherer, call_dynamic_filter
from slime.rollout.group_stream import GroupStream, run_rollout_hooks
from slime.rollout.groups import Group, GroupJob, first_group_index, is_complete, reset_items
from slime.rollout.hooks.hook import find_hook, with_notes
from slime.rollout.outages import ServiceOutage, is_of_service
from slime.rollout.requests.engines import router_urls
from slime.rollout.requests.generate_state import request_limit
from slime.rollout.requests.request_slots import RequestSlots
from slime.rollout.rm_hub.failure import TooManyRewardFailures
from slime.rollout.staleness import (
    UNKNOWN_WEIGHTS,
    mask_older_versions,
    oldest_step,
    stamp_steps,
    trained_steps,
    with_all_steps,
)
from slime.utils.async_utils import get_async_loop, run
from slime.utils.declared import with_defaults
from slime.utils.moved import also_named
from slime.utils.types import iter_samples

if TYPE_CHECKING:
    from slime.rollout.data_source import DataSource
    from slime.rollout.rm_hub.errors import RewardErrors

__all__ = ["AsyncRolloutWorker", "generate_rollout_fully_async", "get_global_worker", "stop_global_worker"]

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""A group that failed this often stops the run."""
MAX_EXPIRED = 10
"""So does one that was too old this often: it is waited for after the first time, so its versions cannot be right."""


class AsyncRolloutWorker(GroupStream):
    """Keeps groups of ``data_buffer`` in flight, at most ``concurrency``, and as many waiting to be consumed.

    Groups begin as slots become free and ``--max-staleness`` allows. The worker runs on the process's asyncio loop,
    not on a separate thread; ``start``, ``stop``, ``wake``, ``get_completed_groups``, ``queue_size`` and ``unconsumed``
    may be called from any other thread.
    """

    turns_between = 3
    """Turns of the event loop after which the samples of a new group hold a slot or wait for one."""
    generates_copies = True
    """The samples that the data source saves must not change while they are written."""

    def __init__(self, args: Args, data_buffer: DataSource, concurrency: int | None = None) -> None:
        args = with_defaults(args)
        super().__init__(args, sglang_rollout.generate_job, find_hook(args, "dynamic_sampling_filter_path"))
        self.data_source = data_buffer
        self.concurrency = concurrency or request_limit(args)
        self.rollout_id = args.start_rollout_id or 0
        self.keeps_dropped = args.rollout_all_samples_process_path is not None
        self.given_back: dict[int, Group] = {}
        """The groups that the data source has taken back since the rollout began."""
        self._aborted_under: int | None = None
        self._aborted_groups: Counter[int] = Counter()
        """The number of times that groups were aborted without a reason under these weights."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forget_clock: Callable[[], None] | None = None

    # Start and stop

    def serves(self, args: Args, data_source: DataSource) -> bool:
        """Return True if it is the worker for these: the same data source, and arguments of the same values."""
        return self.data_source is data_source and (args is self.args or vars(args) == vars(self.args))

    def start(self) -> None:
        """Begin to generate; consuming a rollout does so too."""
        get_async_loop().call_soon_threadsafe(self._start)

    def stop(self) -> None:
        """Stop generating, abort what is in flight, and hand all that was not consumed back to the data source."""
        hand_back(self.data_source, run(self.close()))

    async def close(self) -> list[Group]:
        """Stop for good; return the groups that were not consumed, in the order in which they were drawn."""
        await self.suspend()
        if self._forget_clock is not None:
            self._forget_clock()
            self._forget_clock = None
        self.given_back.clear()  # the data source has them
        left = self.to_save()
        self.waiting.clear()
        self.completed.take()
        return left

    async def suspend(self) -> None:
        """Undo what the rollout in progress took, and stop generating."""
        for job in self.taken:
            self.completed.put(job)
        self.taken = []
        await super().suspend()

    def wake(self) -> None:
        """Check again whether groups can start and rollouts continue."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._notice)

    def _start(self) -> None:
        semaphore = sglang_rollout.GenerateState(self.args).semaphore
        self._slots = semaphore if isinstance(semaphore, RequestSlots) else None
        self._loop = asyncio.get_running_loop()
        if self._forget_clock is None:
            self._forget_clock = self.clock.listen(self.wake)
        super()._start()

    # Consuming

    def get_completed_groups(self, limit: int | None = None) -> list[tuple[int, Group]]:
        """Consume the oldest finished groups, at most ``limit``, as (running number, group); does not wait."""
        jobs = self.completed.take(limit)
        self.wake()
        return [(job.number, job.result) for job in jobs]

    def queue_size(self) -> int:
        """Return how many finished groups wait to be consumed."""
        return len(self.completed)

    def unconsumed(self) -> list[Group]:
        """Return the groups that were drawn and not consumed: the data source saves them with its own state."""

        async def read() -> list[Group]:
            return self.to_save()

        return run(read())

    def to_save(self) -> list[Group]:
        """Return what is to be drawn again after a restart, in the order in which it was drawn.

        That is also what was given back to the data source since the rollout began: its saved state may be older. Of
        groups that became several samples each it is the prompts, which a new start needs.
        """
        begun = (*self.in_flight.values(), *self.waiting, *self.all_held())
        groups = {job.number: job.original for job in begun}
        for job in (*self.completed.peek(), *self.taken):
            fans_out = any(isinstance(item, list) for item in job.result)
            groups[job.number] = job.original if fans_out else job.result
        in_order = [group for _, group in sorted(groups.items())]
        return [with_all_steps(group, self.clock) for group in [*in_order, *self.given_back.values()]]

    async def rollout(self, rollout_id: int) -> RolloutFnTrainOutput:
        """Return the next ``rollout_batch_size`` groups, ordered by their first sample's index.

        An error, also of a hook, stops generation; the next call resumes it with the same groups.
        """
        state = sglang_rollout.GenerateState(self.args)
        self.rollout_id = state.rollout_id = rollout_id
        self.given_back.clear()
        self._no_prompts = False
        # Restart the groups in flight that are too old for this rollout.
        old = [task for task, job in self.in_flight.items() if self.bound.is_too_old(job.step, self.rollout_id)]
        for task in sorted(old, key=lambda task: -self.in_flight[task].number):
            self._expire(self.in_flight.pop(task))
            task.cancel()
        try:
            await self.fill(self.args.rollout_batch_size)
            dropped = list(self.dropped)
            groups = [job.result for job in self.taken]
            get_samples = self.data_source.get_samples
            data = await run_rollout_hooks(self.args, groups, [*groups, *dropped], get_samples)
        except BaseException:
            await self.suspend()
            raise
        self.taken = []
        del self.dropped[: len(dropped)]
        self.rollout_id += 1
        metrics = self._metrics(state.reward_errors)
        self._room.set()
        return RolloutFnTrainOutput(samples=data, metrics=metrics)

    def _metrics(self, reward_errors: RewardErrors) -> dict[str, Any]:
        """Return the metrics since the last call."""
        counts = {"fully_async/aborted_groups": self.aborted, **self.counts}
        metrics = {
            **self.filtered.collect(),
            "rollout/fully_async/ready_groups": len(self.completed),
            "rollout/fully_async/groups_in_flight": len(self.in_flight),
            **{f"rollout/{name}": count for name, count in counts.items() if count},
            **reward_errors.metrics(),
            **(self._slots.metrics() if self._slots is not None else {}),
        }
        self.filtered, self.aborted = MetricGatherer(), 0
        self.counts.clear()
        reward_errors.count_anew()
        return metrics

    async def evaluate(self, rollout_id: int) -> RolloutFnEvalOutput:
        """Run the built-in evaluation. Groups in flight continue; new ones start in the slots that it leaves free."""
        return (await sglang_rollout.eval_rollout(self.args, rollout_id))[0]

    def _take(self, target: int) -> int:
        """Take the oldest completed groups that are young enough until ``target`` are taken; return how many more.

        Groups that were restarted once are waited for when this rollout is their last chance: otherwise long
        responses might never be trained on.
        """
        too_old = self.completed.take(where=lambda job: self.bound.is_too_old(job.oldest, self.rollout_id))
        for job in reversed(too_old):
            self._expire(job)
        last = [job for job in self.in_flight.values() if self.bound.is_last_chance(job.step, self.rollout_id)]
        overdue = sum(1 for job in last if job.expired)
        jobs = self.completed.take(target - len(self.taken) - overdue)
        for job in jobs:
            stamp_steps(job.result, self.clock)
        self.taken += jobs
        return len(jobs)

    def _progress(self) -> dict[str, Any]:
        return {"running": len(self.in_flight), "ready": len(self.completed)}

    @property
    def is_exhausted(self) -> bool:
        """True when the data source has no more prompts and nothing is on its way."""
        on_its_way = self.in_flight or self.waiting or len(self.completed) or self.held or self.is_paused
        return self._no_prompts and not on_its_way

    # The way of a group

    def _draw(self) -> list[Group]:
        groups = draw_groups(self.args, self.data_source.get_samples, 1)
        for group in groups:
            self.given_back.pop(first_group_index(group), None)
        return groups

    def _may_begin(self) -> bool:
        if self._no_prompts and not self.waiting and not self.held:
            return False
        if len(self.in_flight) >= self.concurrency or len(self.completed) >= self.concurrency:
            return False
        if self._slots_are_awaited:
            return False
        # A held group counts toward the bound while others are in flight: their outcome decides whether it is retried,
        # and behind newer groups it would exceed --max-staleness.
        held = len(self.all_held()) if self.in_flight else 0
        return self.bound.may_start(self.ahead + held, self.rollout_id, self.clock.step)

    def _begin(self, job: GroupJob) -> asyncio.Task[Any] | None:
        complete = is_complete(job.original)
        # Responses from before an abort or a restart; those that will be left out of the loss may stay.
        if complete or not self._masks:
            lost = reset_items(job.original, self._is_too_old)
            if lost and not job.expired:
                self._count_regenerated(lost)
        if not is_complete(job.original):
            return super()._begin(job)
        # It comes from before a restart, where the filter may have been against it.
        job.step, job.result = self.clock.step, job.original
        self._finished(job, call_dynamic_filter(self._filter, self.args, job.original))
        return None

    def _record(self, group: Group) -> None:
        if record := getattr(self.data_source, "record_completed", None):
            record(group)

    def _on_group_failed(self, job: GroupJob) -> None:
        if self._was_aborted_for_a_push(job):
            self.aborted += 1
            self._hand_back(job, self._to_begin_again(job))
        else:
            super()._on_group_failed(job)

    def _was_aborted_for_a_push(self, job: GroupJob) -> bool:
        """True when engines may have aborted a group to take new weights: once per group and version.

        A generate function that always aborts is therefore seen for what it is the second time. Groups that have no
        number cannot be distinguished: of them as many as are in flight.
        """
        mode, version = self.args.weight_sync_pause_mode, self.clock.step
        aborts = mode == "abort" or (mode == "auto" and self.args.rollout_external)
        reported = any("abort_reason" in (sample.metadata or {}) for sample in iter_samples(job.result))
        if not aborts or reported or version is None:
            return False
        if self._aborted_under != version:
            self._aborted_under = version
            self._aborted_groups.clear()
        number = first_group_index(job.original)
        self._aborted_groups[number] += 1
        return self._aborted_groups[number] <= (self.concurrency if number == -1 else 1)

    def _keep(self, job: GroupJob) -> None:
        stamp_steps(job.result, self.clock, job.step)
        if self._masks:
            self.counts["staleness/masked_tokens"] += mask_older_versions(job.result)
        job.oldest = oldest_step(job.result, self.clock, job.step)
        super()._keep(job)

    def _failed(self, job: GroupJob, error: BaseException) -> None:
        """A group raised: it is restarted, a few times; then the run stops with the error."""
        job.failures += 1
        said_enough = isinstance(error, (TooManyRewardFailures, ServiceOutage))  # they count all groups
        if said_enough or is_of_service(error, router_urls(self.args)):
            super()._failed(job, error)
            return
        if job.failures >= MAX_FAILURES:
            super()._failed(job, error)
            error.add_note(f"this was attempt {job.failures} of {MAX_FAILURES}")
            return
        self.waiting.appendleft(job)
        self.counts["fully_async/failed_attempts"] += 1
        error.add_note(f"while generating {job.name()}")
        logger.warning(
            "%s failed (attempt %d of %d) and begins again: %s: %s",
            job.name(), job.failures, MAX_FAILURES, type(error).__name__, with_notes(error), exc_info=error,
        )  # fmt: skip

    def _to_begin_again(self, job: GroupJob) -> Group:
        fans_out = any(isinstance(item, list) for item in job.result)
        return job.result if self.args.partial_rollout and job.result and not fans_out else job.original

    def _hand_back(self, job: GroupJob, group: Group) -> None:
        job.original = group
        source = self.data_source
        try:
            if not hasattr(source, "add_samples") or not getattr(source, "accepts_samples", True):
                self.waiting.appendleft(job)
            else:
                source.add_samples([group])
                self.given_back[first_group_index(group)] = group
                self._no_prompts = False
        except Exception as e:  # noqa: BLE001  (raised by the rollout that waits)
            self.waiting.appendleft(job)
            self.stop_with(e)

    def _expire(self, job: GroupJob) -> None:
        """Restart a group that is too old, before all others."""
        self._count_regenerated(sum(sample.response_length for sample in iter_samples(job.result)))
        job.expired += 1
        if job.expired >= MAX_EXPIRED:
            made_at = sorted({str(step) for s in iter_samples(job.result) for step, _ in trained_steps(s, self.clock)})
            self.stop_with(
                RuntimeError(
                    f"rollout {self.rollout_id}: {job.name()} was too old for --max-staleness {self.bound.limit} "
                    f"{job.expired} times, though it was generated again each time. Its engines should hold the "
                    f"weights of step {self.clock.step}; its tokens are of steps {', '.join(made_at) or 'unknown'} "
                    f"({UNKNOWN_WEIGHTS}: weights that were never pushed). Do all engines get the weights?"
                )
            )
        job.result, job.oldest = [], None
        self.waiting.appendleft(job)
        self._probe_is_lost(job)


_worker: AsyncRolloutWorker | None = None
_worker_lock = threading.Lock()


def get_global_worker(args: Args, data_source: DataSource) -> AsyncRolloutWorker:
    """Return the process's worker for ``data_source``; one for another data source or arguments is stopped first."""
    global _worker
    args = with_defaults(args)
    with _worker_lock:
        if _worker is not None and not _worker.serves(args, data_source):
            _worker.stop()
            _worker = None
        if _worker is None:
            _worker = AsyncRolloutWorker(args, data_source)
        return _worker


def stop_global_worker() -> None:
    """Stop the process's worker, if there is one; the next rollout makes another."""
    global _worker
    with _worker_lock:
        worker, _worker = _worker, None
    if worker is not None:
        worker.stop()


atexit.register(stop_global_worker)


def unconsumed_groups() -> list[Group]:
    """Return the groups that the process's worker has drawn and not given to a rollout."""
    worker = _worker
    return [] if worker is None else worker.unconsumed()


@also_named(data_buffer="data_source")
def generate_rollout_fully_async(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """A ``--rollout-function-path`` that blocks only until enough groups are ready; generation continues afterwards."""
    args = with_defaults(args)
    worker = get_global_worker(args, data_source)
    if evaluation:
        return run(worker.evaluate(rollout_id))
    return run(worker.rollout(rollout_id))


# The rollout manager calls these of functions that always generate: to end them, and to save their groups.
generate_rollout_fully_async.stop = stop_global_worker  # type: ignore[attr-defined]
generate_rollout_fully_async.unconsumed = unconsumed_groups  # type: ignore[attr-defined]
