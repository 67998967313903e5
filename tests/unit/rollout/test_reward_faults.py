"""Rewards that really raise, hang, fork and eat memory, in whole rollouts; and how many a server is asked at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.rm_hub import async_rm, remote
from slime.rollout.rm_hub.failure import TooManyRewardFailures
from slime.rollout.rm_hub.workers import RewardWorkers, WorkerLimits
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import Sample

BAD = "tests.support.bad_rewards"
FAULTS = {"raises": "raised", "forks": "raised", "eats_memory": "memory", "loop_in_c": "timeout", "vanishes": "crashed"}
_workers: RewardWorkers | None = None


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    global _workers
    _workers = RewardWorkers(1, WorkerLimits(cpu_s=0.25, memory_bytes=1 << 30))
    yield
    _workers.close()


async def faulty(args: Any, sample: Sample, **_: Any) -> float:
    """The first samples meet one fault each, the others get 1."""
    assert _workers is not None
    faults = args.reward_faults
    if sample.index < len(faults):
        await _workers.call(f"{BAD}.{faults[sample.index]}")
    return await _workers.call(f"{BAD}.echo", 1.0)


@pytest.mark.slow
def test_each_costs_one_sample_and_a_counter(cluster, make_args):
    args = make_args(custom_rm_path=f"{__name__}.faulty", over_sampling_batch_size=4, reward_failure_tolerance=0.9)
    args.reward_faults = list(FAULTS)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    samples = {sample.index: sample for sample in iter_samples(output.samples)}
    assert sorted(samples) == list(range(8))
    for index, sample in samples.items():
        failed = index < len(FAULTS)
        assert (sample.reward, sample.remove_sample) == (0.0 if failed else 1.0, failed)
        assert ("reward_error" in sample.metadata) is failed
    metrics = output.metrics
    assert metrics["rollout/reward/failures"] == len(FAULTS)
    found = {kind: metrics[f"rollout/reward/failures/{kind}"] for kind in ("raised", "memory", "timeout", "crashed")}
    assert found == {"raised": 2, "memory": 1, "timeout": 1, "crashed": 1}
    assert 0 < metrics["rollout/reward/latency/custom/mean"] <= metrics["rollout/reward/latency/custom/p99"]


@pytest.mark.parametrize("fault", ["forks", "loop_in_c"])
def test_beyond_the_tolerance_the_run_stops_with_the_reason(cluster, make_args, fault):
    args = make_args(custom_rm_path=f"{__name__}.faulty", reward_failure_tolerance=0.0)
    args.reward_faults = [fault]
    with pytest.raises(
        TooManyRewardFailures, match=rf"1 {FAULTS[fault]}.*--reward-failure-tolerance.*{BAD}\.{fault}: "
    ):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    cluster.wait_until(lambda: not any(engine.running for engine in cluster.engines), "nothing runs on the engines")


async def test_at_most_64_requests_reach_a_server_at_once(cluster, make_args, monkeypatch):
    monkeypatch.setattr(remote, "_client", None)
    engine = cluster.engines[0]
    engine.delay = 60.0
    args = make_args(rm_type="remote_rm", rm_url=f"{engine.url}/generate")
    asked = [asyncio.create_task(async_rm(args, Sample(index=i, prompt="q"))) for i in range(80)]
    await asyncio.to_thread(cluster.wait_until, lambda: len(engine.running) == 64, "64 requests at the server")
    await asyncio.sleep(0.1)
    assert len(engine.running) == engine.max_running == 64
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await remote.get_client().close()
