"""User settings of the fully asynchronous rollout are kept, and user hooks that raise cost no group."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from slime.rollout import cancelling, fully_async_rollout, group_stream, sglang_rollout
from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.fully_async_rollout import MAX_FAILURES, generate_rollout_fully_async, get_global_worker
from slime.rollout.staleness import WeightClock
from slime.utils.async_utils import run
from slime.utils.types import Sample

HERE = __name__
CALLS: list[list[int]] = []
"""The groups that a hook was called with, call by call."""


@pytest.fixture
def start(make_args, monkeypatch):
    """Return arguments and a data source; whatever a test leaves in flight ends with it."""
    monkeypatch.setattr(group_stream, "weight_clock", WeightClock)
    CALLS.clear()

    def begin(**changes: Any) -> tuple[Any, RolloutDataSourceWithBuffer]:
        args = make_args(prompts=100, sglang_server_concurrency=8, **changes)
        return args, RolloutDataSourceWithBuffer(args)

    yield begin
    fully_async_rollout.stop_global_worker()


class CountingSemaphore(asyncio.Semaphore):
    """Remembers how many hold it at most."""

    held = most = 0

    async def acquire(self) -> Any:
        await super().acquire()
        self.held += 1
        self.most = max(self.most, self.held)
        return True

    def release(self) -> None:
        self.held -= 1
        super().release()


def test_a_semaphore_of_the_users_own_bounds_the_requests(cluster, start):
    args, source = start()
    own = sglang_rollout.GenerateState(args).semaphore = CountingSemaphore(1)
    output = generate_rollout_fully_async(args, 0, source)
    assert sglang_rollout.GenerateState(args).semaphore is own
    assert own.most == 1
    assert len(output.samples) == 4
    assert not any(name.startswith("rollout/requests/") for name in output.metrics)


def test_a_semaphore_may_be_set_between_rollouts(cluster, start):
    args, source = start()
    generate_rollout_fully_async(args, 0, source)
    own = sglang_rollout.GenerateState(args).semaphore = CountingSemaphore(2)
    for rollout_id in range(1, 12):  # more than the groups that were made before
        generate_rollout_fully_async(args, rollout_id, source)
    assert sglang_rollout.GenerateState(args).semaphore is own
    assert 1 <= own.most <= 2


def indices(groups: Any) -> list[int]:
    return sorted(next(iter_samples(group)).group_index for group in groups)


def everywhere(args: Any, source: Any, *outputs: Any) -> list[int]:
    """The groups that were trained on or wait somewhere, after the end."""
    left = run(get_global_worker(args, source).close())
    return indices([*left, *source.buffer, *(group for output in outputs for group in output.samples)])


def finish(group: list[Sample]) -> list[Sample]:
    for sample in group:
        sample.tokens, sample.response, sample.response_length = [112, 48, 5], "x", 1
        sample.rollout_log_probs, sample.reward, sample.status = [-0.1], 1.0, Sample.Status.COMPLETED
    return group


def raise_on_the_first_calls(args: Any, group: list[Sample], **_: Any) -> bool:
    if group[0].group_index == 0:
        CALLS.append(indices([group]))
        if len(CALLS) <= args.raises:
            raise ValueError("the filter broke")
    return True


def test_a_filter_that_raises_for_a_finished_group_costs_it_nothing(cluster, start, caplog):
    args, source = start(dynamic_sampling_filter_path=f"{HERE}.raise_on_the_first_calls")
    args.raises = MAX_FAILURES - 1
    source.add_samples([finish(source.get_samples(1)[0])])
    output = generate_rollout_fully_async(args, 0, source)
    assert CALLS == [[0]] * MAX_FAILURES
    assert output.metrics["rollout/fully_async/failed_attempts"] == MAX_FAILURES - 1
    assert "group 0 (samples [0, 1]) failed" in caplog.text
    assert everywhere(args, source, output) == list(range(source.sample_group_index))


def test_a_filter_that_always_raises_stops_the_run_and_keeps_the_group(cluster, start):
    args, source = start(dynamic_sampling_filter_path=f"{HERE}.raise_on_the_first_calls")
    args.raises = MAX_FAILURES
    source.add_samples([finish(source.get_samples(1)[0])])
    with pytest.raises(ValueError, match="the filter broke") as raised:
        generate_rollout_fully_async(args, 0, source)
    notes = "\n".join(raised.value.__notes__)
    assert "group 0 (samples [0, 1])" in notes
    assert f"{HERE}.raise_on_the_first_calls" in notes
    output = generate_rollout_fully_async(args, 0, source)
    assert everywhere(args, source, output) == list(range(source.sample_group_index))


async def fail_after_the_rollout(args: Any, sample: Sample, **_: Any) -> float:
    """The rewards of the fifth group fail when ``args.fails`` is set."""
    if sample.group_index != 4:
        return 1.0
    args.begun.release()
    while not args.fails.is_set():
        await asyncio.sleep(0.001)
    raise ValueError("the judge went away")


def test_rewards_that_fail_in_a_later_rollout_than_they_began_in_are_counted(cluster, start):
    args, source = start(custom_rm_path=f"{HERE}.fail_after_the_rollout")
    args.begun, args.fails = threading.Semaphore(0), threading.Event()
    first = generate_rollout_fully_async(args, 0, source)
    for _ in range(args.n_samples_per_prompt):
        assert args.begun.acquire(timeout=30)
    second = generate_rollout_fully_async(args, 1, source)
    args.fails.set()
    failed = [output.metrics.get("rollout/reward/failures", 0) for output in (first, second)]
    while not any(group[0].group_index == 4 for group in second.samples):
        second = generate_rollout_fully_async(args, len(failed), source)
        failed.append(second.metrics.get("rollout/reward/failures", 0))
    assert failed[:2] == [0, 0]
    assert sum(failed) == 2


def drop_odd(args: Any, group: list[Sample], **_: Any) -> bool:
    return group[0].group_index % 2 == 0


def look_and_raise_once(args: Any, groups: list[Any], get_samples: Any = None) -> None:
    CALLS.append(indices(groups))
    if len(CALLS) == 1:
        raise ValueError("the hook broke")


@pytest.mark.parametrize("flag", ["rollout_sample_filter_path", "rollout_all_samples_process_path"])
def test_a_hook_of_the_whole_rollout_that_raises_loses_no_group(cluster, start, flag):
    args, source = start(dynamic_sampling_filter_path=f"{HERE}.drop_odd", **{flag: f"{HERE}.look_and_raise_once"})
    with pytest.raises(ValueError, match="the hook broke"):
        generate_rollout_fully_async(args, 0, source)
    worker = get_global_worker(args, source)
    assert worker._filler is None, "generation continues though the rollout ended early"
    assert not worker.in_flight
    output = generate_rollout_fully_async(args, 0, source)
    first, second = ([number for number in call if number % 2] for call in CALLS)
    assert set(first) <= set(second), "groups that the filter dropped are not shown again"
    assert [number for number in CALLS[1] if number % 2 == 0] == indices(output.samples)
    kept = [number for number in range(source.sample_group_index) if number % 2 == 0]
    assert [number for number in everywhere(args, source, output) if number % 2 == 0] == kept


ENTERED, MAY_END = threading.Semaphore(0), threading.Event()


async def closes_slowly(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    if sample.group_index < 4:
        return await sglang_rollout.generate(args, sample, sampling_params)
    ENTERED.release()
    try:
        await asyncio.Event().wait()
    finally:
        while not MAY_END.is_set():
            await asyncio.sleep(0.001)


def test_stopping_does_not_wait_for_a_hook_that_does_not_end(cluster, start, monkeypatch, caplog):
    monkeypatch.setattr(cancelling, "CANCEL_GRACE_S", 0.05)
    args, source = start(custom_generate_function_path=f"{HERE}.closes_slowly")
    generate_rollout_fully_async(args, 0, source)
    assert all(ENTERED.acquire(timeout=60) for _ in range(2))
    generate_rollout_fully_async.stop()
    (said,) = [record.message for record in caplog.records if record.name == cancelling.__name__]
    for name in ("group 4 (samples [8, 9])", "in closes_slowly ("):
        assert name in said
    assert 4 in [group[0].group_index for group in source.buffer]
    assert not any(sample.response_length for group in source.buffer for sample in group)
    MAY_END.set()
