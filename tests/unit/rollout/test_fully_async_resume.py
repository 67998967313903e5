"""A checkpoint holds the groups that the fully asynchronous rollout works on."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from slime.rollout import fully_async_rollout, group_stream
from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from slime.rollout.staleness import WeightClock
from slime.utils.async_utils import run
from slime.utils.types import Sample


@pytest.fixture
def start(make_args, monkeypatch):
    """Return arguments and a data source; whatever a test leaves in flight ends with it."""
    monkeypatch.setattr(group_stream, "weight_clock", WeightClock)

    def begin(**changes):
        args = make_args(prompts=100, sglang_server_concurrency=8, **changes)
        return args, RolloutDataSourceWithBuffer(args)

    yield begin
    fully_async_rollout.stop_global_worker()


def test_unconsumed_groups_are_part_of_the_saved_state(cluster, start, tmp_path):
    args, source = start(save=str(tmp_path), load=str(tmp_path))
    consumed = generate_rollout_fully_async(args, 0, source).samples
    source.unconsumed = generate_rollout_fully_async.unconsumed  # as the rollout manager does
    source.snapshot(0)
    source.save(0)
    fully_async_rollout.stop_global_worker()
    again = RolloutDataSourceWithBuffer(args)
    again.load(0)
    groups = [g for i in (1, 2, 3) for g in generate_rollout_fully_async(args, i, again).samples]
    seen = Counter(group[0].group_index for group in [*consumed, *groups])
    assert max(seen.values()) == 1
    left = fully_async_rollout.get_global_worker(args, again).unconsumed()
    everything = sorted([*seen, *(group[0].group_index for group in left)])
    assert everything == list(range(len(everything)))


def test_groups_of_before_a_restart_are_as_old_as_they_were(cluster, start, tmp_path, monkeypatch):
    """The versions of the engines are counted from 1 again; steps continue."""
    args, source = start(save=str(tmp_path), load=str(tmp_path), max_staleness=2)
    before, after = WeightClock(), WeightClock()
    monkeypatch.setattr(group_stream, "weight_clock", lambda: before)
    for engine in cluster.engines:
        engine.weight_version = "1"
    before.publish(1, 5)
    args.start_rollout_id = 5
    first = {group[0].group_index for group in generate_rollout_fully_async(args, 5, source).samples}
    ready = set(range(12)) - first
    worker = fully_async_rollout.get_global_worker(args, source)
    cluster.wait_until(lambda: worker.queue_size() == 8, "two more rollouts of weights of step 5 are ready")
    source.unconsumed = generate_rollout_fully_async.unconsumed
    source.snapshot(5)
    source.save(5)
    fully_async_rollout.stop_global_worker()

    monkeypatch.setattr(group_stream, "weight_clock", lambda: after)
    after.publish(1, 6)
    args.start_rollout_id = 6
    again = RolloutDataSourceWithBuffer(args)
    again.load(5)
    for engine in cluster.engines:
        engine.requests.clear()
    steps, drawn = [], []
    for rollout_id in (6, 7, 8):
        if rollout_id > 6:
            after.publish(rollout_id - 5, rollout_id)
            for engine in cluster.engines:
                engine.weight_version = str(rollout_id - 5)
        output = generate_rollout_fully_async(args, rollout_id, again)
        steps.append({span["step"] for s in iter_samples(output.samples) for span in s.weight_version_spans})
        drawn += [group[0].group_index for group in output.samples]
        assert min(steps[-1]) >= rollout_id - 2
        assert "rollout/staleness/regenerated_groups" not in output.metrics
    assert steps[:2] == [{5}, {5}]  # as they were, oldest first, and not made again
    assert steps[2] <= {6, 7, 8}
    assert set(drawn[:8]) == ready
    asked = {bytes(request["input_ids"]).decode() for request in cluster.requests}
    assert asked
    assert not asked & {f"p{index}" for index in ready}


async def hangs(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    await asyncio.sleep(60)
    return sample


def test_a_group_that_is_given_back_while_the_state_is_saved_is_in_it_once(cluster, start, tmp_path):
    args, source = start(save=str(tmp_path), load=str(tmp_path), custom_generate_function_path=f"{__name__}.hangs")
    worker = fully_async_rollout.get_global_worker(args, source)
    worker.start()
    cluster.wait_until(lambda: len(worker.in_flight) > 2, "groups are in flight")

    async def give_up() -> list[Any]:
        task, job = next(iter(worker.in_flight.items()))
        worker.in_flight.pop(task)
        task.cancel()
        worker._on_group_failed(job)
        return [group[0].group_index for group in worker.to_save()]

    def unconsumed() -> list[Any]:
        known = run(give_up())
        assert sorted(known) == list(range(len(known)))
        return worker.unconsumed()

    worker._no_prompts = True  # begins no others meanwhile
    worker.stop_with(RuntimeError("no more"))
    source.unconsumed = unconsumed
    drawn = source.sample_group_index
    source.snapshot(0)
    source.save(0)
    fully_async_rollout.stop_global_worker()
    assert sorted(group[0].group_index for group in source.buffer) == list(range(drawn))
    again = RolloutDataSourceWithBuffer(args)
    again.load(0)
    assert sorted(group[0].group_index for group in again.buffer) == list(range(drawn))
