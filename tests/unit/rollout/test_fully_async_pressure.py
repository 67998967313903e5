"""Thousands of groups through the fully asynchronous rollout, with faults: none lost, none twice, and nothing grows."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.ray.manager import rollout_metrics
from slime.rollout import fully_async_rollout, group_stream, outages, sglang_rollout
from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from slime.rollout.requests import generate_request
from slime.rollout.staleness import WeightClock
from slime.servers import http_client, http_utils
from slime.utils.async_utils import get_async_loop, run
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args, write_prompts
from tests.support.versioned_engine import VersionedCluster

pytestmark = pytest.mark.slow

HERE = __name__
BATCH = 20
RNG = random.Random(0)


async def unreliable(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The default generate function, that sometimes raises and sometimes gives up."""
    fate = RNG.random()
    if fate < 0.002:
        raise ValueError("an accident")
    if fate > 0.99:
        sample.status = Sample.Status.ABORTED
        return sample
    return await sglang_rollout.generate(args, sample, sampling_params)


def drop_some(args: Any, group: list[Any], **_: Any) -> bool:
    keep = RNG.random() > 0.1
    if not keep:
        args.dropped.add(group[0].group_index)
    return keep


def measure() -> dict[str, int]:
    """Measure the quantities that must not grow. Waits until requests that were aborted have gone."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "samples": sum(isinstance(found, Sample) for found in gc.get_objects()),
        "tasks": len(asyncio.all_tasks(get_async_loop())),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "MiB": resident >> 20,
    }


@pytest.mark.parametrize("groups", [1000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_nothing_is_lost_and_nothing_grows(tokenizer, tmp_path, monkeypatch, groups):
    clock = WeightClock()
    for module in (group_stream, rollout_metrics):
        monkeypatch.setattr(module, "weight_clock", lambda: clock)
    SingletonMeta.clear_instances()
    for module, name, value in (
        (http_utils, "_http_client", None), (generate_request, "RESUME_PAUSE_S", 0.0),
        (http_client, "BACKOFF_BASE_S", 0.01), (outages, "FIRST_PAUSE_S", 0.01),
        (fully_async_rollout, "MAX_FAILURES", 10**6), (fully_async_rollout.logger, "disabled", True),
        (http_client.logger, "disabled", True),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    rng = random.Random(3)
    lengths = random.Random(4)
    cluster = VersionedCluster(2, 3, rate=0.01, length=lambda: min(30, int(lengths.lognormvariate(1.5, 0.8)) + 1))
    with cluster:
        args = rollout_args(
            prompt_data=str(write_prompts(tmp_path / "prompts.jsonl", 50)), sglang_router_ip=cluster.host,
            sglang_router_port=cluster.port, sglang_server_concurrency=16, rollout_batch_size=BATCH, max_staleness=2,
            n_samples_per_prompt=1, custom_generate_function_path=f"{HERE}.unreliable", rollout_max_response_len=64,
            dynamic_sampling_filter_path=f"{HERE}.drop_some",
        )  # fmt: skip
        args.dropped = set()
        http_utils.init_http_client(args)
        source = RolloutDataSourceWithBuffer(args)
        try:
            consumed, measured = press(cluster, clock, args, source, groups, rng)
        finally:
            fully_async_rollout.stop_global_worker()
            run(http_utils._http_client.close())
            SingletonMeta.clear_instances()
    left = {group[0].group_index for group in source.buffer}
    assert set(consumed.values()) == {1}, "nothing twice"
    assert not left & set(consumed), "nothing twice"
    # The verdict on a group that was given up meanwhile does not count.
    assert set(consumed) | left | args.dropped == set(range(source.sample_group_index)), "nothing lost"
    assert 0.05 < len(args.dropped) / source.sample_group_index < 0.2
    assert measured["retried"] > 0
    print(f"{source.sample_group_index} groups: {measured}")


def press(
    cluster: VersionedCluster, clock: WeightClock, args: SimpleNamespace, source: Any, groups: int, rng: random.Random
) -> tuple[Counter[int], dict[str, Any]]:
    """Consume rollouts as ``train_async.py`` does: the next one begins before the weights are pushed."""
    consumed: Counter[int] = Counter()
    retried = 0
    cluster.push(1)
    clock.publish(1, 0)
    marks: list[dict[str, int]] = []
    found: dict[str, Any] = {}
    rollouts = groups // BATCH

    def rollout(rollout_id: int) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: found.update(output=generate_rollout_fully_async(args, rollout_id, source))
        )
        thread.start()
        return thread

    upcoming = rollout(0)
    for rollout_id in range(rollouts):
        upcoming.join(120)
        output = found.pop("output")
        consumed.update(group[0].group_index for group in output.samples)
        retried += sum(value for name, value in output.metrics.items() if "attempts" in name or "aborted" in name)
        for sample in iter_samples(output.samples):
            versions = [cluster.weights.made[round(-log_prob)][1] for log_prob in sample.rollout_log_probs]
            assert rollout_id - (min(versions) - 1) <= args.max_staleness
        del output
        cluster.weights.forget(100_000)
        if rollout_id in (rollouts // 5, rollouts - 1):
            marks.append(measure())
        if rollout_id + 1 < rollouts:
            upcoming = rollout(rollout_id + 1)
        time.sleep(rng.choice([0.0, 0.0, 0.01]))  # the trainer
        cluster.push(rollout_id + 2, rng.choice(["retract", "abort"]))
        clock.publish(rollout_id + 2, rollout_id + 1)
    before, after = marks
    # What is in flight differs from moment to moment: at most 32 groups, each with a few tasks and connections.
    room = {"samples": 300, "tasks": 200, "threads": 4, "files": 300, "MiB": 64}
    assert {name: after[name] - before[name] for name in room if after[name] - before[name] > room[name]} == {}
    return consumed, {"retried": retried, "before": before, "after": after}
