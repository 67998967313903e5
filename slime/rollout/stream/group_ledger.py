"""The state of every group of the fully asynchronous rollout, and its transitions."""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from slime.rollout.filter_hub.base_types import MetricGatherer, should_drop_dynamic_filter_output
from slime.rollout.groups import Group, first_group_index, is_complete, iter_samples, reset_items
from slime.rollout.hooks.hook import with_notes
from slime.rollout.rm_hub.failure import TooManyRewardFailures
from slime.rollout.staleness import (
    UNKNOWN_WEIGHTS,
    StalenessBound,
    WeightClock,
    mask_older_versions,
    oldest_step,
    stamp_steps,
    trained_steps,
    with_all_steps,
)
from slime.rollout.stream.group_job import CompletedGroups, GroupJob
from slime.rollout.train_rollout import too_many_aborted

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""A group that failed this often stops the run."""
MAX_EXPIRED = 10
"""So does one that was too old this often: it is waited for after the first time, so its versions cannot be right."""


class GroupLedger:
    """Each group that was drawn is in exactly one place: ``waiting`` to begin (again), ``in_flight`` (by its task),
    ``completed``, ``taken`` by the rollout in progress, ``dropped`` by the dynamic filter, or consumed and forgotten.

    ``give_back`` takes a group back into the data source, which draws it again; it returns False when it cannot.

    Attributes:
        rollout_id: the rollout that the next group is for.
        failure: what stops the run.
    """

    def __init__(
        self, args: Any, bound: StalenessBound, clock: WeightClock, give_back: Callable[[Group], bool]
    ) -> None:
        self.args, self.bound, self.clock = args, bound, clock
        self._give_back = give_back
        self.waiting: deque[GroupJob] = deque()
        self.in_flight: dict[Any, GroupJob] = {}
        self.completed = CompletedGroups()
        self.taken: list[GroupJob] = []
        self.given_back: dict[int, Group] = {}
        self.dropped: list[Group] = []
        self.rollout_id: int = args.start_rollout_id or 0
        self.failure: BaseException | None = None
        self._masks = bool(args.partial_rollout and args.mask_offpolicy_in_partial_rollout)
        self._keeps_dropped = args.rollout_all_samples_process_path is not None
        self._numbers = itertools.count()
        self._counts: Counter[str] = Counter()
        self._filtered = MetricGatherer()

    @property
    def ahead(self) -> int:
        """How many groups are consumed before one that begins now, counted from the start of ``rollout_id``."""
        return len(self.taken) + len(self.completed) + len(self.in_flight)

    def add(self, groups: list[Group]) -> None:
        """Take in groups from the data source."""
        for group in groups:
            self.given_back.pop(first_group_index(group), None)
        self.waiting.extend(GroupJob(group, next(self._numbers)) for group in groups)

    def unconsumed(self) -> list[Group]:
        """Return what is to be drawn again after a restart, in the order in which it was drawn.

        That is also what was given back to the data source since the rollout began: its saved state may be older.
        """
        jobs = [*self.completed.peek(), *self.taken, *self.in_flight.values(), *self.waiting]
        groups = [job.to_save() for job in sorted(jobs, key=lambda job: job.number)]
        return [with_all_steps(group, self.clock) for group in [*groups, *self.given_back.values()]]

    def forget_too_old(self, job: GroupJob) -> None:
        """Before a job starts: drop responses from before an abort or a restart that ``rollout_id`` must not train on.

        Those that will be left out of the loss may stay.
        """
        if self.bound.limit is None or (self._masks and not is_complete(job.original)):
            return
        lost = reset_items(job.original, self._is_too_old)
        if lost and not job.expired:
            self._count_regenerated(lost)

    def _is_too_old(self, samples: Any) -> bool:
        return self.bound.is_too_old(oldest_step(samples, self.clock, None), self.rollout_id)

    # Rollouts

    def begin_rollout(self, rollout_id: int) -> list[Any]:
        """Start a rollout; return the tasks whose groups are too old for it and wait to be generated again."""
        self.rollout_id = rollout_id
        self.given_back.clear()
        old = [task for task, job in self.in_flight.items() if self.bound.is_too_old(job.step, rollout_id)]
        for task in sorted(old, key=lambda task: -self.in_flight[task].number):
            self.expire(self.in_flight.pop(task))
        return old

    def take(self, target: int) -> int:
        """Take the oldest completed groups that are young enough until ``target`` are taken; return how many more.

        Groups that were restarted once are waited for when this rollout is their last chance: otherwise long
        responses might never be trained on.
        """
        rollout_id = self.rollout_id
        for job in reversed(self.completed.take(where=lambda job: self.bound.is_too_old(job.oldest, rollout_id))):
            self.expire(job)
        last = [job for job in self.in_flight.values() if self.bound.is_last_chance(job.step, rollout_id)]
        overdue = sum(1 for job in last if job.expired)
        jobs = self.completed.take(target - len(self.taken) - overdue)
        for job in jobs:
            stamp_steps(job.result, self.clock)
        self.taken += jobs
        return len(jobs)

    def end_rollout(self, dropped: int) -> dict[str, Any]:
        """Forget what was taken, and the oldest ``dropped`` of the groups dropped; return the metrics since the last
        end."""
        self.taken = []
        del self.dropped[:dropped]
        metrics = {
            **self._filtered.collect(),
            "rollout/fully_async/ready_groups": len(self.completed),
            "rollout/fully_async/groups_in_flight": len(self.in_flight),
            **{f"rollout/{name}": count for name, count in self._counts.items() if count},
        }
        self._filtered, self._counts = MetricGatherer(), Counter()
        self.rollout_id += 1
        return metrics

    def put_back(self) -> list[Any]:
        """Undo what the rollout in progress took, and let all groups in flight wait again; return their tasks."""
        for job in self.taken:
            self.completed.put(job)
        self.taken = []
        tasks = list(self.in_flight)
        self.waiting.extendleft(sorted(self.in_flight.values(), key=lambda job: -job.number))
        self.in_flight.clear()
        return tasks

    # Ends of generation

    def finish(self, job: GroupJob, group: Group, verdict: Any) -> None:
        """A group was generated and scored: queue it, unless the dynamic filter's ``verdict`` is against it."""
        if should_drop_dynamic_filter_output(
            verdict, remaining_batch_size=self.ahead + 1, target_data_size=self.args.rollout_batch_size
        ):
            self._filtered.on_dynamic_filter_drop(verdict.reason)
            if self._keeps_dropped:
                self.dropped.append(group)
            return
        stamp_steps(group, self.clock, job.step)
        if self._masks:
            self._counts["staleness/masked_tokens"] += mask_older_versions(group)
        job.result = group
        job.oldest = oldest_step(group, self.clock, job.step)
        self.completed.put(job)

    def fail(self, job: GroupJob, error: BaseException) -> None:
        """A group raised: it is restarted, a few times; then the run stops with the error, which names it."""
        job.failures += 1
        error.add_note(f"while generating {job.name()}")
        self.waiting.appendleft(job)
        if isinstance(error, TooManyRewardFailures):  # it counts all groups, and says enough
            self.stop_with(error)
            return
        if job.failures >= MAX_FAILURES:
            error.add_note(f"this was attempt {job.failures} of {MAX_FAILURES}")
            self.stop_with(error)
            return
        self._counts["fully_async/failed_attempts"] += 1
        logger.warning(
            "%s failed (attempt %d of %d) and begins again: %s: %s",
            job.name(), job.failures, MAX_FAILURES, type(error).__name__, with_notes(error), exc_info=error,
        )  # fmt: skip

    def abort(self, job: GroupJob, group: Group) -> None:
        """A generate function gave up on a group: it goes back to the data source and is restarted, with
        ``partial_rollout`` where it stopped."""
        self._counts["fully_async/aborted_groups"] += 1
        count = self._counts["fully_async/aborted_groups"]
        if self.args.partial_rollout and not any(isinstance(item, list) for item in group):
            stamp_steps(group, self.clock, job.step)
            job.original = group
        try:
            given_back = self._give_back(job.original)
        except Exception as e:  # noqa: BLE001  (raised by the rollout that waits)
            given_back = False
            self.stop_with(e)
        if given_back:
            self.given_back[first_group_index(job.original)] = job.original
        else:
            self.waiting.appendleft(job)
        if error := too_many_aborted(self.args, self.rollout_id, count, job.name()):
            self.stop_with(error)

    def expire(self, job: GroupJob) -> None:
        """Restart a group that is too old, before all others."""
        self._count_regenerated(sum(sample.response_length for sample in iter_samples(job.result or [])))
        job.expired += 1
        if job.expired >= MAX_EXPIRED:
            made_at = sorted(
                {str(step) for s in iter_samples(job.result or []) for step, _ in trained_steps(s, self.clock)}
            )
            self.stop_with(
                RuntimeError(
                    f"rollout {self.rollout_id}: {job.name()} was too old for --max-staleness {self.bound.limit} "
                    f"{job.expired} times, though it was generated again each time. Its engines should hold the "
                    f"weights of step {self.clock.step}; its tokens are of steps {', '.join(made_at) or 'unknown'} "
                    f"({UNKNOWN_WEIGHTS}: weights that were never pushed). Do all engines get the weights?"
                )
            )
        job.result = job.oldest = None
        self.waiting.appendleft(job)

    def _count_regenerated(self, tokens: int) -> None:
        self._counts["staleness/regenerated_groups"] += 1
        self._counts["staleness/regenerated_tokens"] += tokens

    def stop_with(self, error: BaseException) -> None:
        """Remember the first failure that stops the run."""
        self.failure = self.failure or error
