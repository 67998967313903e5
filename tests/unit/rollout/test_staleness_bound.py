"""The fully asynchronous rollout in virtual time: random durations, updates, failures and aborts.

A stand-in generates and knows, independently of what it reports, at which training step each token was made.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from slime.rollout import fully_async_rollout, group_stream, sglang_rollout
from slime.rollout.base_types import iter_samples
from slime.rollout.cancelling import gather_or_cancel
from slime.rollout.fully_async_rollout import AsyncRolloutWorker
from slime.rollout.rm_hub.errors import RewardErrors
from slime.rollout.staleness import WeightClock
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args
from tests.support.virtual_time import run_virtually


class Source:
    """Numbers its groups."""

    accepts_samples = False

    def __init__(self, size: int) -> None:
        self.size, self.drawn = size, 0

    def get_samples(self, count: int) -> list[list[Sample]]:
        groups = []
        for _ in range(count):
            first = self.drawn * self.size
            groups.append([Sample(group_index=self.drawn, index=first + i, prompt="p") for i in range(self.size)])
            self.drawn += 1
        return groups


@dataclass
class World:
    """Engines at a version, the training step that it holds, and what the stand-in generation does."""

    rng: random.Random
    args: SimpleNamespace
    clock: WeightClock
    state: Any
    mean_s: float
    version: int = 0
    step: int = 0
    made_at: dict[int, list[int]] = field(default_factory=dict)
    """Serial number of a response -> the step at which each of its tokens was really made."""
    trouble: Counter = field(default_factory=Counter)
    lags: Counter = field(default_factory=Counter)

    async def generate_group(self, args: Any, group: list[Sample], params: Any, evaluation: bool = False) -> list[Any]:
        return await gather_or_cancel([self.generate(sample) for sample in group])

    async def generate(self, sample: Sample) -> Sample:
        async with self.state.semaphore:
            assert sample.response_length == 0
            tokens = self.rng.randint(1, 6)
            pause = self.rng.lognormvariate(0.0, 1.0) * self.mean_s / tokens
            steps, versions = [], []
            for _ in range(tokens):
                await asyncio.sleep(pause)
                steps.append(self.step)
                versions.append(self.version)
            fate = self.rng.random()
            if fate < 0.03 and self.trouble[sample.group_index] < 2:
                self.trouble[sample.group_index] += 1
                raise ValueError("an accident")
            aborted = fate > 0.98
            serial = len(self.made_at)
            self.made_at[serial] = steps
            spans = [
                {"version": str(v), "start": versions.index(v), "end": versions.index(v) + versions.count(v)}
                for v in sorted(set(versions))
            ]
            sample.append_response_tokens(
                tokens=[serial] * tokens,
                log_probs=[0.0] * tokens,
                meta_info={
                    "finish_reason": {"type": "abort" if aborted else "stop"},
                    "weight_version": str(versions[-1]),
                    "weight_versions": spans,
                },
            )
            sample.reward = 0.0
        return sample

    async def update(self) -> None:
        """Engines get new weights; a moment later the clock is updated."""
        self.version, self.step = self.version + 1, self.step + 1
        await asyncio.sleep(self.rng.choice([0.0, 0.01, 0.3]))
        self.clock.publish(self.version, self.step)

    async def train(self) -> None:
        await asyncio.sleep(self.rng.lognormvariate(0.0, 0.7) * 3)


def make_world(monkeypatch: pytest.MonkeyPatch, seed: int, limit: int | None, mean_s: float, **changes: Any) -> World:
    rng = random.Random(seed)
    args = rollout_args(max_staleness=limit, sglang_server_concurrency=8, rollout_request_timeout=1e6, **changes)
    clock = WeightClock()
    state = SimpleNamespace(
        semaphore=asyncio.Semaphore(16), sampling_params={}, rollout_id=None, reward_errors=RewardErrors()
    )
    world = World(rng, args, clock, state, mean_s)
    monkeypatch.setattr(group_stream, "weight_clock", lambda: clock)
    monkeypatch.setattr(sglang_rollout, "GenerateState", lambda args: state)
    monkeypatch.setattr(sglang_rollout, "generate_and_rm_group", world.generate_group)
    monkeypatch.setattr(fully_async_rollout.logger, "disabled", True)  # an accident is logged with its traceback
    return world


async def simulate(world: World, source: Source, rollouts: int, *, ahead: bool) -> list[Any]:
    """Run the loop of ``train_async.py``: with ``ahead`` a rollout begins while the one before it is trained on."""
    worker = AsyncRolloutWorker(world.args, source)
    await world.update()
    world.step = 0
    world.clock.publish(world.version, 0)
    consumed: list[Any] = []
    upcoming = asyncio.ensure_future(worker.rollout(0))
    for rollout_id in range(rollouts):
        output = await upcoming
        groups = output.samples
        assert len(groups) == world.args.rollout_batch_size
        consumed += groups
        for sample in iter_samples(groups):
            truth = world.made_at[sample.tokens[-1]]
            spans = [(t, span) for span in sample.weight_version_spans for t in range(span["start"], span["end"])]
            assert [t for t, _ in spans] == list(range(sample.response_length))
            # A version that has not been published to the clock yet has no step.
            assert all(span.get("step", truth[t]) == truth[t] for t, span in spans)
            world.lags.update(rollout_id - step for step in truth)
        more = rollout_id + 1 < rollouts
        if more and ahead:
            upcoming = asyncio.ensure_future(worker.rollout(rollout_id + 1))
        await world.train()
        await world.update()
        if more and not ahead:
            upcoming = asyncio.ensure_future(worker.rollout(rollout_id + 1))
    left = await worker.close()
    everything = Counter(group[0].group_index for group in [*consumed, *left])
    assert set(everything.values()) == {1}, "nothing is consumed twice"
    assert set(everything) == set(range(source.drawn)), "nothing is lost"
    for sample in iter_samples(consumed):
        assert sample.status == Sample.Status.COMPLETED
    return consumed


def check(monkeypatch: pytest.MonkeyPatch, seed: int, limit: int | None, mean_s: float, rollouts: int, ahead: bool):
    world = make_world(monkeypatch, seed, limit, mean_s)
    run_virtually(simulate(world, Source(world.args.n_samples_per_prompt), rollouts, ahead=ahead))
    if limit is not None:
        assert max(world.lags) <= limit
    return world


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("mean_s", [0.2, 2.0, 20.0])
@pytest.mark.parametrize("limit", [0, 1, 2, None])
def test_no_token_is_older_than_the_bound(monkeypatch, limit, mean_s, ahead):
    world = check(monkeypatch, 7, limit, mean_s, 20, ahead)
    if limit is None and mean_s == 0.2:  # generation is far ahead of training: without the bound lags grow
        assert max(world.lags) > 2


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_no_token_is_older_than_the_bound_over_ten_thousand_groups(monkeypatch, seed):
    groups = 0
    for limit in (0, 1, 2, 4, None):
        for mean_s in (0.3, 3.0, 30.0):
            for ahead in (True, False):
                check(monkeypatch, seed, limit, mean_s, 100, ahead)
                groups += 400
    assert groups >= 10_000
