"""The life of a group: drawn, generated, filtered, then taken by a rollout or handed back to the data source.

``GroupStream`` is what every rollout shares. ``RolloutStream`` ends with its rollout, with nothing in flight: it serves
the synchronous and the partial rollout. The one that never ends is ``fully_async_rollout.AsyncRolloutWorker``.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from slime.arguments.args import Args
from slime.observability.progress import progress_bar
from slime.rollout.cancelling import cancel_all
from slime.rollout.data_source import draw_groups
from slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    await_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.groups import (
    FINISHED,
    Group,
    GroupJob,
    describe_oldest,
    first_index,
    has_aborted,
    iter_samples,
    job_of,
    reset_items,
)
from slime.rollout.held_groups import HeldGroups
from slime.rollout.hooks.hook import make_hook
from slime.rollout.outages import is_of_service, with_users_line
from slime.rollout.requests.engines import abort_all_until_idle, router_urls
from slime.rollout.requests.request_slots import RequestSlots
from slime.rollout.staleness import (
    StalenessBound,
    oldest_step,
    settle_steps,
    stamp_steps,
    weight_clock,
    with_all_steps,
)
from slime.servers.http_utils import get_http_client
from slime.utils.types import Sample

if TYPE_CHECKING:
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput
    from slime.rollout.requests.generate_state import RolloutState

logger = logging.getLogger(__name__)

ABORT_DEADLINE_S = 60.0
FINISH_GRACE_S = 10.0
"""Time in which groups have to return once the engines were stopped and pending rewards left behind."""
WAITING_NOTE_S = 60.0
"""Interval at which a rollout with nothing in flight logs what it waits for."""


Generate = Callable[[Any, GroupJob], Awaitable[Group]]
"""``sglang_rollout.generate_job``."""


class CompletedGroups:
    """Finished groups, oldest first: by the weights that made them, and among equals by when they finished.

    Thread-safe, and no method waits for anything but another one.
    """

    def __init__(self) -> None:
        self._jobs: list[GroupJob] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: GroupJob) -> None:
        """Append a finished job."""
        with self._lock:
            self._jobs.append(job)

    def take(self, limit: int | None = None, where: Callable[[GroupJob], bool] | None = None) -> list[GroupJob]:
        """Remove and return the oldest jobs, at most ``limit``; with ``where`` of those that it holds for."""
        with self._lock:
            found = [job for job in self._jobs if where is None or where(job)]
            found.sort(key=lambda job: -1 if job.oldest is None else job.oldest)
            taken = found if limit is None else found[: max(0, limit)]
            chosen = {id(job) for job in taken}
            self._jobs = [job for job in self._jobs if id(job) not in chosen]
            return taken

    def peek(self) -> list[GroupJob]:
        """Return the jobs, which stay."""
        with self._lock:
            return list(self._jobs)


# The groups of a rollout


class GroupStream(HeldGroups):
    """Begins groups, filters those that finish, and queues them for the rollout in progress, on one event loop.

    Each group that was drawn is in exactly one place: ``waiting`` to begin (again), ``in_flight`` (by its task),
    ``completed``, ``taken`` by the rollout in progress, ``dropped`` by the dynamic filter, ``held`` after it was given
    up (see ``slime.rollout.outages``), or back in the data source. ``generate(args, job)`` generates and scores one.
    ``failure`` is what stops the run.
    """

    turns_between = 1
    """Turns of the event loop between the starts of two groups: to start thousands at once would keep it from the first
    replies, and their slots empty."""
    generates_copies = False
    """True if the samples that were drawn stay as they are. Else they are what is generated: rewards may be pending."""
    keeps_dropped = True

    def __init__(self, args: Args, generate: Generate, dynamic_filter: Callable[..., Any] | None) -> None:
        super().__init__(args)
        self.rollout_id = 0
        self.clock = weight_clock()
        self.bound = StalenessBound(args.max_staleness, args.rollout_batch_size)
        self.completed = CompletedGroups()
        self.taken: list[GroupJob] = []
        self.dropped: list[Group] = []
        self.aborted = 0
        self.filtered = MetricGatherer()
        self.failure: BaseException | None = None
        self._generate, self._filter = generate, dynamic_filter
        self._masks = bool(args.partial_rollout and args.mask_offpolicy_in_partial_rollout)
        self._numbers = itertools.count()
        self._no_prompts = False
        self._filler: asyncio.Task[None] | None = None
        self._slots: RequestSlots | None = None
        """The slots that groups in flight wait for; None: a plug-in's own semaphore."""
        self._room, self._change = asyncio.Event(), asyncio.Event()

    @property
    def ahead(self) -> int:
        """The number of groups consumed before one that begins now, counted from the start of ``rollout_id``."""
        return len(self.taken) + len(self.completed) + len(self.in_flight)

    @property
    def is_stopping(self) -> bool:
        """True when groups that end are of no use any more."""
        return False

    async def fill(self, target: int) -> None:
        """Return when ``target`` groups are taken.

        Raises the failure of a group, and TimeoutError when no group finishes for too long.
        """
        self._start()
        stall_s = 2.0 * self.args.rollout_request_timeout
        with progress_bar(f"rollout {self.rollout_id}", target, "group") as progress:
            while True:
                failure, self.failure = self.failure, None  # another call is another attempt
                if failure is not None:
                    raise failure
                progress.update(self._take(target), **self._progress())
                self._room.set()
                done, busy = len(self.taken), len(self.in_flight)
                if done == target:
                    return
                if self.is_exhausted:
                    raise RuntimeError(
                        f"rollout {self.rollout_id}: the data source has no more prompts; {done} of {target} groups "
                        f"are done, {busy} in flight"
                    )
                try:
                    async with asyncio.timeout(stall_s if busy else WAITING_NOTE_S):
                        await self._change.wait()
                    self._change.clear()
                except TimeoutError:
                    if busy:
                        raise TimeoutError(
                            f"rollout {self.rollout_id}: no group finished for {stall_s:g} s "
                            f"(2 x --rollout-request-timeout); {done} of {target} are done, {busy} in flight, the "
                            f"oldest: {describe_oldest(self.in_flight.values())}"
                        ) from None
                    if self.is_paused:
                        continue
                    logger.info(
                        "rollout %d waits for new weights: the engines have those of step %s, --max-staleness is %s, "
                        "%d groups are ahead", self.rollout_id, self.clock.step, self.bound.limit, self.ahead,
                    )  # fmt: skip

    async def suspend(self) -> None:
        """Stop generating; groups in flight are aborted on the engines and wait to begin again."""
        self._stop_filling()
        self._end_pauses()
        tasks = list(self.in_flight)
        self.waiting.extendleft(sorted(self.in_flight.values(), key=lambda job: -job.number))
        self.in_flight.clear()  # first: results of cancelled tasks are dropped
        await cancel_all(tasks)
        await get_http_client().drain_aborts()

    # What differs between rollouts

    @abstractmethod
    def _draw(self) -> list[Group]:
        """Return the next groups of the data source; none when it has no more."""

    @abstractmethod
    def _take(self, target: int) -> int:
        """Take completed groups until ``target`` are taken; return how many more."""

    @abstractmethod
    def _progress(self) -> dict[str, Any]:
        """Return numbers for the progress bar."""

    @property
    @abstractmethod
    def is_exhausted(self) -> bool:
        """True when the data source has no more prompts and the rollout cannot be filled."""

    @abstractmethod
    def _record(self, group: Group) -> None:
        """Let the data source keep a finished group, in case that the run has to be resumed."""

    # The way of a group

    def _start(self) -> None:
        """Begin to generate, on the running loop; nothing happens when that was done already."""
        if self._slots is not None:
            self._slots.changed = self._room.set
        if self._filler is None or self._filler.done():
            self._filler = asyncio.get_running_loop().create_task(self._keep_filling(), name="group-filler")
        self._room.set()

    def _stop_filling(self) -> None:
        if self._slots is not None:
            self._slots.changed = lambda: None
        if self._filler is not None:
            self._filler.cancel()
            self._filler = None

    @property
    def _slots_are_awaited(self) -> bool:
        """True when enough groups wait for slots: one in flight takes much more memory than one that waits to begin."""
        return self._slots is not None and self._slots.waiting >= max(1, self.args.n_samples_per_prompt)

    async def _keep_filling(self) -> None:
        while True:
            await self._room.wait()
            self._room.clear()
            try:
                while self.failure is None and not self.is_paused and self._may_begin() and self._begin_next():
                    for _ in range(self.turns_between):
                        await asyncio.sleep(0)
            except Exception as e:  # noqa: BLE001  (raised by the rollout that waits)
                self.stop_with(e)
                self._change.set()

    def _begin_next(self) -> bool:
        """Begin the next group; False when there is none."""
        job = self._next_job()
        self._change.set()
        if job is not None:
            self._try_to_begin(job)
            return True
        if self.held:
            self._pause(next(iter(self.held)))  # there is nothing else to try
        else:
            self._no_prompts = True
        return False

    def _next_job(self) -> GroupJob | None:
        if not self.waiting:
            self.waiting.extend(GroupJob(group, next(self._numbers)) for group in self._draw())
        return self.waiting.popleft() if self.waiting else None

    def _try_to_begin(self, job: GroupJob) -> None:
        try:
            self._begin(job)
        except Exception as e:  # noqa: BLE001  (what the filter raises costs no group, as while it is generated)
            self._failed(job, e)

    def _begin(self, job: GroupJob) -> asyncio.Task[Any] | None:
        task = job.begin(self._run, self.clock.step, on_copy=self.generates_copies)
        self.in_flight[task] = job
        task.add_done_callback(self._ended)
        return task

    async def _run(self, job: GroupJob) -> Any:
        """Generate a group; return the dynamic filter's verdict on it, None for one that was aborted."""
        group = await self._generate(self.args, job)
        expected = self.args.n_samples_per_prompt
        assert len(group) == expected, f"{job.name()} came back with {len(group)} samples, expected {expected}"
        self._stamp(group, job.step)
        if self.is_stopping or has_aborted(group):
            return None
        self._record(with_all_steps(group, self.clock))
        return await await_dynamic_filter(self._filter, self.args, group)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """The callback of every task; it only sorts, and waits for nothing."""
        job = self.in_flight.pop(task, None)
        stray = RuntimeError("cancelled unexpectedly")  # a group that was cancelled here is not in flight any more
        error = stray if task.cancelled() else task.exception()
        if job is None:
            return
        if error is not None:
            self._failed(job, error)
        elif (verdict := task.result()) is None:
            self._on_group_failed(job)
        else:
            if not job.was_finished:  # else nothing was asked
                self._answered(job)
            self._finished(job, verdict)
        self._probe_is_lost(job)  # if it still is one: it raised, or belongs to another service
        self._notice()

    def _notice(self) -> None:
        self._room.set()
        self._change.set()

    def _stamp(self, group: Group, step: int | None) -> None:
        """Note which training step made the tokens; ``step`` is that of the weights at the start."""
        stamp_steps(group, self.clock, step)

    def _finished(self, job: GroupJob, verdict: DynamicFilterOutput) -> None:
        on_the_way = self.ahead + 1 + len(self.waiting)
        if should_drop_dynamic_filter_output(
            verdict, remaining_batch_size=on_the_way, target_data_size=self.args.rollout_batch_size
        ):
            self.filtered.on_dynamic_filter_drop(verdict.reason)
            if self.keeps_dropped:
                self.dropped.append(job.result)
        else:
            self._keep(job)

    def _keep(self, job: GroupJob) -> None:
        self.completed.put(job)

    def _failed(self, job: GroupJob, error: BaseException) -> None:
        """A group raised: the run stops with the error, which names it, unless a service that it needs failed."""
        if is_of_service(error, router_urls(self.args)):
            self._hold(job, with_users_line(error))
            return
        error.add_note(f"while generating {job.name()}")
        self.waiting.appendleft(job)
        self.stop_with(error)

    def _on_group_failed(self, job: GroupJob) -> None:
        """The generate function gave up on a group: a prompt of its own kind, or a service that is down."""
        self.aborted += 1
        reported = [s.metadata for s in iter_samples(job.result) if "abort_reason" in (s.metadata or {})]
        for metadata in reported:
            self.counts[f"aborted/{metadata['abort_reason']}"] += 1
        why = reported[-1].get("abort_error", reported[-1]["abort_reason"]) if reported else "its samples are ABORTED"
        self._hold(job, f"{job.name()}: {why}")

    def stop_with(self, error: BaseException) -> None:
        """Remember the first failure that stops the run."""
        self.failure = self.failure or error

    def _is_too_old(self, samples: Sample | Group) -> bool:
        return self.bound.is_too_old(oldest_step(samples, self.clock, None), self.rollout_id)

    def _count_regenerated(self, tokens: int) -> None:
        self.counts["staleness/regenerated_groups"] += 1
        self.counts["staleness/regenerated_tokens"] += tokens


class RolloutStream(GroupStream):
    """The groups of rollout ``rollout_id``: over-sampled, and after it none is in flight. ``state`` is GenerateState.

    ``handed_back`` are groups that the generate function gave up on, then finished ones that were not needed;
    ``unfinished`` those that were in flight when the rollout was complete.
    """

    def __init__(
        self,
        args: Args,
        rollout_id: int,
        state: RolloutState,
        get_samples: Callable[[int], list[Group]],
        generate: Generate,
        dynamic_filter: Callable[..., Any] | None,
    ) -> None:
        super().__init__(args, generate, dynamic_filter)
        self.rollout_id, self.state, self.get_samples = rollout_id, state, get_samples
        self.step = self.clock.step
        self._slots = state.semaphore if isinstance(state.semaphore, RequestSlots) else None
        self.handed_back: list[Group] = []
        self.unfinished: list[Group] = []
        self._began, self._tokens = time.monotonic(), 0
        self._reward_sum, self._rewarded = 0.0, 0

    async def drain(self, abort: Callable[[Any, int], Awaitable[list[Group]]]) -> None:
        """End the rollout: hand back what was not needed, and what ``abort`` returns of the groups in flight."""
        self._stop_filling()
        for job in self.all_held():  # nothing of its service succeeded after it
            self._hand_back(job, self._to_begin_again(job))
        self.held.clear()
        self._end_pauses()
        self.unfinished = [*await abort(self.args, self.rollout_id), *(job.original for job in self.waiting)]
        self.unfinished.sort(key=first_index)
        await cancel_all(self.state.pendings)
        self.handed_back += [job.result for job in self.completed.take()]
        self.waiting.clear()
        self.in_flight.clear()
        for group in self.unfinished:
            self._stamp(group, self.step)

    def unused(self) -> list[Group]:
        """Return all that was drawn and not dropped, for a rollout that fails."""
        finished = [job.result for job in (*self.taken, *self.completed.peek())]
        waiting = [job.finished_or_original() for job in (*self.waiting, *self.all_held())]
        return sorted([*finished, *self.handed_back, *self.unfinished, *waiting], key=first_index)

    def metrics(self) -> dict[str, Any]:
        """Return the counts of dropped, regenerated, handed back and unfinished groups."""
        metrics: dict[str, Any] = self.filtered.collect()
        metrics |= {f"rollout/{name}": count for name, count in self.counts.items() if count}
        if self.handed_back:
            metrics["rollout/handed_back_groups"] = len(self.handed_back)
        if self.unfinished:
            name = "partial_groups" if self.args.partial_rollout else "put_back_groups"
            metrics[f"rollout/{name}"] = len(self.unfinished)
        return metrics

    @property
    def is_stopping(self) -> bool:
        return bool(self.state.aborted)

    @property
    def is_exhausted(self) -> bool:
        return self._no_prompts

    def reset_stale(self, group: Group) -> None:
        """Reset what this rollout must not train on of a group that was drawn to its prompts, and count it.

        That is what ``--max-staleness`` forbids; and groups that earlier rollouts finished, when
        ``--mask-offpolicy-in-partial-rollout`` would leave all of their tokens out of the loss.
        """
        if not self._masks:
            lost = reset_items(group, self._is_too_old)
        elif all(sample.status in FINISHED for sample in iter_samples(group)):
            lost = reset_items(group, lambda item: True)
        else:
            lost = 0
            self.counts["staleness/masked_tokens"] += sum(s.effective_response_length for s in iter_samples(group))
        if lost:
            self._count_regenerated(lost)

    def _draw(self) -> list[Group]:
        return draw_groups(self.args, self.get_samples, self.args.over_sampling_batch_size)

    def _may_begin(self) -> bool:
        if self._slots_are_awaited:
            return False
        # Groups that the filter drops or the generate function gives up are replaced by new ones.
        return bool(self.waiting) or self.ahead < self.args.rollout_batch_size

    def _begin(self, job: GroupJob) -> asyncio.Task[Any] | None:
        self.reset_stale(job.original)
        task = super()._begin(job)
        self.state.pendings.add(task)
        self.state.remaining_batch_size = self.ahead
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        job = self.in_flight.get(task)
        if job is None or self.is_stopping:  # then ``abort`` returns what has become of it
            return
        super()._ended(task)
        self.state.pendings.discard(task)
        self.state.remaining_batch_size = self.ahead
        for sample in iter_samples(job.result):
            self._tokens += sample.response_length
            reward = sample.reward
            if isinstance(reward, dict):
                reward = reward.get(self.args.reward_key or "score")
            if isinstance(reward, (int, float)):
                self._reward_sum, self._rewarded = self._reward_sum + reward, self._rewarded + 1

    def _stamp(self, group: Group, step: int | None) -> None:
        stamp_steps(group, self.clock, self.step)
        settle_steps(group, self.clock)

    def _record(self, group: Group) -> None:
        if self.state.on_completed is not None:
            self.state.on_completed(group)

    def _to_begin_again(self, job: GroupJob) -> Group:
        return job.to_continue() if self.args.partial_rollout else job.original

    def _hand_back(self, job: GroupJob, group: Group) -> None:
        self.handed_back.append(group)

    def _take(self, target: int) -> int:
        jobs = sorted(self.completed.take(), key=lambda job: first_index(job.result))
        more = target - len(self.taken)
        self.taken += jobs[:more]
        for job in jobs[more:]:
            self.completed.put(job)
        return len(jobs[:more])

    def _progress(self) -> dict[str, Any]:
        return {
            "reward": self._reward_sum / self._rewarded if self._rewarded else 0.0,
            "tok_per_s": round(self._tokens / max(1e-9, time.monotonic() - self._began), 1),
            "running": len(self.in_flight),
            "dropped": len(self.dropped),
        }


async def stop_in_flight(args: Args, rollout_id: int, state: RolloutState, router_urls: list[str]) -> list[Group]:
    """Abort what the engines are generating and return the groups in flight, in order, to be handed back.

    With ``partial_rollout`` that is what has been generated of them; rewards are left pending, and the
    next rollout that gets the group waits for them. Without it nothing is waited for, and groups that are not
    finished are as they were drawn: their prompts are neither skipped nor continued.
    """
    assert not state.aborted, "this rollout was aborted already"
    state.aborted = True
    jobs = {task: job_of(task) for task in state.pendings}
    if not jobs:
        return []
    if not args.partial_rollout:
        with get_http_client().abort_left_to_caller(router_urls):
            await cancel_all(jobs)
        await get_http_client().drain_aborts()
    for router_url in router_urls:
        await abort_all_until_idle(router_url, ABORT_DEADLINE_S)
    if args.partial_rollout:
        state.pending_rewards.leave()
        # Those with a result are at most in the dynamic filter, whose verdict is of no use any more.
        if running := [task for task, job in jobs.items() if not job.result]:
            await asyncio.wait(running, timeout=FINISH_GRACE_S)
        await cancel_all(jobs)
    state.pendings = set()
    groups = (
        [_to_resume(task, job, rollout_id) for task, job in jobs.items()]
        if args.partial_rollout
        else ([job.finished_or_original() for job in jobs.values()])
    )
    return sorted(groups, key=first_index)


def _to_resume(task: asyncio.Task[Any], job: GroupJob, rollout_id: int) -> Group:
    if not job.result and task.done() and not task.cancelled():
        logger.warning("%s failed while it was aborted: %r", job.name(), task.exception())
    group = job.to_continue()
    for sample in iter_samples(group):
        if sample.status == Sample.Status.PENDING and sample.response_length:
            sample.status = Sample.Status.ABORTED
        if sample.response_length and "start_rollout_id" not in sample.metadata:  # tokens may have no text yet
            sample.metadata["start_rollout_id"] = rollout_id
    return group


async def run_rollout_hooks(
    args: Args,
    accepted: list[Group],
    seen: list[Group],
    get_samples: Callable[[int], list[Group]],
    load: Callable[[str], Any] | None = None,
) -> list[Group]:
    """Run the hooks of a whole rollout; return the accepted groups in order, as the sample filter leaves them.

    ``seen`` are the groups that were accepted or dropped by the dynamic filter; ``load`` replaces ``load_function``.
    """
    data = sorted(accepted, key=first_index)
    if path := args.rollout_sample_filter_path:
        await make_hook(path, "rollout_sample_filter_path", load=load).awaited(args, data)
    if path := args.rollout_all_samples_process_path:
        hook = make_hook(path, "rollout_all_samples_process_path", load=load)
        await hook.awaited(args, sorted(seen, key=first_index), get_samples)
    return data
