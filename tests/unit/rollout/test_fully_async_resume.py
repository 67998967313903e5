"""A checkpoint holds the groups that the fully asynchronous rollout works on."""

from __future__ import annotations

from collections import Counter

import pytest

from slime.rollout import fully_async_rollout, generation_stream
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from slime.rollout.staleness import WeightClock


@pytest.fixture
def start(make_args, monkeypatch):
    """Return arguments and a data source; whatever a test leaves in flight ends with it."""
    monkeypatch.setattr(generation_stream, "weight_clock", WeightClock)

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
