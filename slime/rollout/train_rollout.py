"""The loop of one training rollout: submit, collect, filter, and abort what is not needed any more."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from slime.observability.progress import progress_bar
from slime.rollout.cancelling import cancel_all
from slime.rollout.data_source import draw_groups
from slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    await_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.groups import Group, first_index, has_aborted, iter_samples
from slime.rollout.hooks.hook import make_hook
from slime.rollout.requests.engines import abort_all_until_idle
from slime.rollout.requests.generate_state import Completions
from slime.rollout.staleness import StalenessFilter
from slime.utils.http_utils import get_http_client
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

ABORT_DEADLINE_S = 60.0
FINISH_GRACE_S = 10.0
"""How long groups may take to return once the engines were stopped and pending rewards left behind."""
MAX_ABORTED_SHARE = 4
SUBMITTED_AT_ONCE = 8


class Collection:
    """The groups of one rollout: accepted, dropped, handed back."""

    def __init__(self, args: Any, rollout_id: int, dynamic_filter: Callable[..., Any] | None) -> None:
        self.args = args
        self.rollout_id = rollout_id
        self.filter = dynamic_filter
        self.accepted: list[Group] = []
        self.seen: list[Group] = []
        self.handed_back: list[Group] = []
        self.unfinished: list[Group] = []
        self.drawn: list[Group] = []
        """Those that have not been started."""
        self.aborted = 0
        self.metrics = MetricGatherer()
        self.staleness = StalenessFilter(args, rollout_id)

    async def add(self, group: Group, original: Group, state: Any) -> None:
        """Accept, drop or hand back one finished group; ``original`` is what was drawn."""
        assert len(group) == self.args.n_samples_per_prompt, (
            f"group {first_index(group)} has {len(group)} samples, expected --n-samples-per-prompt "
            f"{self.args.n_samples_per_prompt}"
        )
        if has_aborted(group):
            self._requeue(group if self.args.partial_rollout else original, original, state)
            return
        target = self.args.rollout_batch_size
        verdict = await await_dynamic_filter(self.filter, self.args, group)
        drop = should_drop_dynamic_filter_output(
            verdict, remaining_batch_size=state.remaining_batch_size, target_data_size=target
        )
        if not drop and len(self.accepted) >= target:
            self.handed_back.append(group)
            return
        self.seen.append(group)
        if drop:
            self.metrics.on_dynamic_filter_drop(verdict.reason)
            state.remaining_batch_size -= 1
        else:
            self.accepted.append(group)

    def collect_metrics(self) -> dict[str, Any]:
        """Return the counts of dropped, handed-back and too old groups."""
        metrics: dict[str, Any] = self.metrics.collect() | self.staleness.metrics()
        if self.handed_back:
            metrics["rollout/handed_back_groups"] = len(self.handed_back)
        return metrics

    def unused(self) -> list[Group]:
        """Return all that was drawn and not dropped, for a rollout that fails."""
        return sorted([*self.accepted, *self.handed_back, *self.unfinished, *self.drawn], key=first_index)

    def _requeue(self, group: Group, original: Group, state: Any) -> None:
        """A generate function gave up on this group: it goes back to the source, and another takes its place."""
        self.aborted += 1
        if error := too_many_aborted(self.args, self.rollout_id, self.aborted, f"group {first_index(group)}"):
            raise error
        self.handed_back.append(_to_continue(group, original))
        state.remaining_batch_size -= 1


def too_many_aborted(args: Any, rollout_id: int, count: int, last: str) -> RuntimeError | None:
    """Return the error that stops a rollout whose generate function gives up on too many groups."""
    if count <= MAX_ABORTED_SHARE * args.rollout_batch_size:
        return None
    return RuntimeError(
        f"rollout {rollout_id}: {count} groups have ABORTED samples though nothing was aborted, the last one {last}; "
        "check the generate function"
    )


async def run_rollout_hooks(
    args: Any, accepted: list[Group], seen: list[Group], get_samples: Any, load: Callable[[str], Any] | None = None
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


async def collect(args: Any, state: Any, get_samples: Callable[[int], list[Group]], collection: Collection) -> None:
    """Keep groups in flight until ``rollout_batch_size`` are accepted; ``state`` is the GenerateState.

    Raises the first failure of a group, and TimeoutError when no group finishes for too long.
    """
    target = args.rollout_batch_size
    stall_s = 2.0 * args.rollout_request_timeout
    completions = Completions()
    with progress_bar(f"rollout {collection.rollout_id}", target, "group") as progress:
        began = time.monotonic()
        tokens = 0
        reward_sum, rewarded = 0.0, 0
        while len(collection.accepted) < target:
            # Groups that the filter drops or the generate function gives up are replaced by new ones.
            while state.remaining_batch_size < target:
                collection.drawn = draw_groups(args, get_samples, args.over_sampling_batch_size)
                if not collection.drawn:
                    raise RuntimeError(f"rollout {collection.rollout_id}: the data source has no more prompts")
                collection.staleness.reset_stale(collection.drawn)
                await _submit(state, collection.drawn)
            done = await completions.wait(state.pendings, stall_s)
            state.pendings -= done
            if not done:
                raise TimeoutError(
                    f"rollout {collection.rollout_id}: no group finished for {stall_s:g} s "
                    f"(2 x --rollout-request-timeout); {len(collection.accepted)} of {target} are done, "
                    f"{len(state.pendings)} in flight, the oldest: {state.groups_in_flight.describe_oldest()}"
                )
            for task in _in_order(done, state):
                before, group = len(collection.accepted), task.result()
                collection.staleness.stamp(group)  # first: the journal saves the steps of the tokens too
                if state.on_completed is not None and not has_aborted(group):
                    state.on_completed(group)
                # A filter that raises must find the group still in flight, so that it is handed back.
                await collection.add(group, state.groups_in_flight.original(task), state)
                state.groups_in_flight.take_original(task)
                samples = list(iter_samples(group))
                tokens += sum(sample.response_length for sample in samples)
                for reward in (_reward_number(args, sample) for sample in samples):
                    if reward is not None:
                        reward_sum, rewarded = reward_sum + reward, rewarded + 1
                progress.update(
                    len(collection.accepted) - before,
                    reward=reward_sum / rewarded if rewarded else 0.0,
                    tok_per_s=round(tokens / max(1e-9, time.monotonic() - began), 1),
                    running=len(state.pendings),
                    dropped=len(collection.seen) - len(collection.accepted),
                )


async def _submit(state: Any, groups: list[Group]) -> None:
    """Start the groups, and take them out of the list, a few at a time: to start thousands at once would keep the event
    loop from the first replies, and their slots empty."""
    while groups:
        state.submit_generate_tasks(groups[:SUBMITTED_AT_ONCE])
        del groups[:SUBMITTED_AT_ONCE]
        await asyncio.sleep(0)


def _in_order(done: set[asyncio.Task[Any]], state: Any) -> list[asyncio.Task[Any]]:
    """Return finished tasks ordered by the sample index of their results; raise the first failure."""
    failures = []
    for task in done:
        error = RuntimeError("cancelled unexpectedly") if task.cancelled() else task.exception()
        if error is not None:
            group = state.groups_in_flight.original(task)
            error.add_note(f"while generating group {first_index(group)} (samples {_indices(group)})")
            failures.append((first_index(group), error))
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]
    return sorted(done, key=lambda task: first_index(task.result()))


async def stop_in_flight(args: Any, rollout_id: int, state: Any, router_urls: list[str]) -> list[Group]:
    """Abort what the engines are generating and return the groups in flight, in order, to be handed back.

    With ``partial_rollout`` that is what has been generated of them; rewards are left pending, and the
    next rollout that gets the group waits for them. Without it nothing is waited for, and groups that are not
    finished are as they were drawn: their prompts are neither skipped nor continued.
    """
    assert not state.aborted, "this rollout was aborted already"
    state.aborted = True
    if not state.pendings:
        return []
    tasks = list(state.pendings)
    if not args.partial_rollout:
        with get_http_client().abort_left_to_caller(router_urls):
            await cancel_all(tasks)
        await get_http_client().drain_aborts()
    for router_url in router_urls:
        await abort_all_until_idle(router_url, ABORT_DEADLINE_S)
    if not args.partial_rollout:
        state.pendings = set()
        return sorted((_finished_or_original(task, state) for task in tasks), key=first_index)
    state.pending_rewards.leave()
    _, late = await asyncio.wait(tasks, timeout=FINISH_GRACE_S)
    await cancel_all(late)
    state.pendings = set()
    return sorted((_unfinished_group(task, rollout_id, state) for task in tasks), key=first_index)


async def give_up(state: Any) -> list[Group]:
    """Cancel everything in flight after a failure; return the groups that are finished, and the others as they were
    drawn."""
    tasks, state.pendings = state.pendings, set()
    await cancel_all(tasks)
    return [_finished_or_original(task, state) for task in state.groups_in_flight]


def _finished_or_original(task: asyncio.Task[Any], state: Any) -> Group:
    original: Group = state.groups_in_flight.take_original(task)
    if not _has_result(task):
        return original
    unfinished = (Sample.Status.PENDING, Sample.Status.ABORTED)
    group: Group = task.result()
    if len(group) != len(original) or any(sample.status in unfinished for sample in iter_samples(group)):
        return original
    return group


def _unfinished_group(task: asyncio.Task[Any], rollout_id: int, state: Any) -> Group:
    if _has_result(task):
        group = _to_continue(task.result(), state.groups_in_flight.take_original(task))
    else:
        group = state.groups_in_flight.take_unfinished(task)
        if task.done() and not task.cancelled():
            logger.warning("group %s failed while it was aborted: %r", first_index(group), task.exception())
    for sample in iter_samples(group):
        if sample.status == Sample.Status.PENDING and sample.response_length:
            sample.status = Sample.Status.ABORTED
        if sample.response_length and "start_rollout_id" not in sample.metadata:  # tokens may have no text yet
            sample.metadata["start_rollout_id"] = rollout_id
    return group


def _has_result(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _to_continue(group: Group, original: Group) -> Group:
    """Return the group with the original samples in place of fan-outs that were aborted in part: they cannot resume."""
    return [
        original[number] if isinstance(item, list) and has_aborted(item) else item for number, item in enumerate(group)
    ]


def _reward_number(args: Any, sample: Sample) -> float | None:
    reward = sample.reward
    if isinstance(reward, dict):
        reward = reward.get(args.reward_key or "score")
    return float(reward) if isinstance(reward, (int, float)) else None


def _indices(group: Any) -> list[int | None]:
    return [sample.index for sample in iter_samples(group)]
