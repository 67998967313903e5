"""Use of the slots for each ``--max-staleness``, in virtual time, and that the documentation says so."""

from __future__ import annotations

import asyncio
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.rollout import group_stream, sglang_rollout
from slime.rollout.cancelling import gather_or_cancel
from slime.rollout.fully_async_rollout import AsyncRolloutWorker
from slime.rollout.requests.request_slots import RequestSlots
from slime.rollout.rm_hub.errors import RewardErrors
from slime.rollout.staleness import WeightClock
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args
from tests.support.virtual_time import run_virtually
from tests.unit.rollout.test_staleness_bound import Source

PAGE = Path(__file__).parents[3] / "docs" / "en" / "advanced" / "asynchronous.md"
ROWS = re.findall(r"^\| (\d|none) \| (\d+) % \| ([\d.]+) \|$", PAGE.read_text(), re.MULTILINE)
SLOTS, GROUPS, SIZE, SIGMA, TRAINING = 32, 8, 8, 0.8, 0.8
ROLLOUTS, WARM_UP = 30, 4


async def simulate(worker: AsyncRolloutWorker, clock: WeightClock, busy: list[float], step_s: float) -> tuple[Any, Any]:
    """Return the share of slots in use and the seconds per step after the first few."""
    loop = asyncio.get_running_loop()
    clock.publish(1, 0)
    upcoming = asyncio.ensure_future(worker.rollout(0))
    since = 0.0
    for rollout_id in range(ROLLOUTS):
        await upcoming
        if rollout_id == WARM_UP - 1:
            since, before = loop.time(), busy[0]
        if rollout_id + 1 < ROLLOUTS:
            upcoming = asyncio.ensure_future(worker.rollout(rollout_id + 1))
        await asyncio.sleep(TRAINING * step_s)
        clock.publish(rollout_id + 2, rollout_id + 1)
    took = loop.time() - since
    use = (busy[0] - before) / took / SLOTS
    await worker.close()
    return use, took / (ROLLOUTS - WARM_UP)


@pytest.mark.parametrize(("limit", "percent", "step"), ROWS)
def test_the_table_of_the_page(monkeypatch, limit, percent, step):
    rng, busy, clock = random.Random(0), [0.0], WeightClock()
    mean_s = 1.0
    args = rollout_args(
        max_staleness=None if limit == "none" else int(limit), sglang_server_concurrency=SLOTS, rollout_num_engines=1,
        rollout_request_timeout=1e9, n_samples_per_prompt=SIZE, rollout_batch_size=GROUPS,
    )  # fmt: skip
    state = SimpleNamespace(
        semaphore=RequestSlots(SLOTS), sampling_params={}, rollout_id=None, reward_errors=RewardErrors()
    )

    async def generate(sample: Sample) -> Sample:
        async with state.semaphore:
            seconds = rng.lognormvariate(math.log(mean_s) - SIGMA**2 / 2, SIGMA)
            await asyncio.sleep(seconds)
            busy[0] += seconds
            meta = {"finish_reason": {"type": "stop"}, "weight_version": str((clock.step or 0) + 1)}
            sample.append_response_tokens(tokens=[1], log_probs=[0.0], meta_info=meta)
            sample.reward = 0.0
        return sample

    async def generate_group(args: Any, group: list[Sample], params: Any, evaluation: bool = False) -> list[Any]:
        return await gather_or_cancel([generate(sample) for sample in group])

    monkeypatch.setattr(group_stream, "weight_clock", lambda: clock)
    monkeypatch.setattr(sglang_rollout, "GenerateState", lambda args: state)
    monkeypatch.setattr(sglang_rollout, "generate_and_rm_group", generate_group)
    step_s = mean_s * GROUPS * SIZE / SLOTS
    worker = AsyncRolloutWorker(args, Source(SIZE))
    use, took = run_virtually(simulate(worker, clock, busy, step_s))
    assert use == pytest.approx(int(percent) / 100, abs=0.01)
    assert took / step_s == pytest.approx(float(step), abs=0.01)


def test_the_page_has_the_table():
    assert [row[0] for row in ROWS] == ["0", "1", "2", "4", "none"]
    assert int(ROWS[-1][1]) >= 97
