"""Random runs of the fully asynchronous rollout in virtual time, with restarts: bounded, complete, and never stuck.

A stand-in generates and knows at which training step each token was made. Runs differ in the bound, the sync interval,
lengths, slots, what engines say, filters, failures, aborts, masks, evaluations, and when they are killed and resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from slime.rollout import fully_async_rollout, group_stream, sglang_rollout
from slime.rollout.base_types import iter_samples
from slime.rollout.cancelling import gather_or_cancel
from slime.rollout.durable.recovery import still_open
from slime.rollout.durable.state_codec import decode_group, encode_group
from slime.rollout.fully_async_rollout import AsyncRolloutWorker
from slime.rollout.groups import copy_group
from slime.rollout.rm_hub.errors import RewardErrors
from slime.rollout.staleness import WeightClock, with_all_steps
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args
from tests.support.virtual_time import run_virtually

pytestmark = pytest.mark.slow

STUCK_S = 1e6
"""Virtual seconds after which nothing can be expected to happen any more."""


class Source:
    """Numbers its groups; those that were put in front or given back come first."""

    def __init__(self, size: int, drawn: int = 0, front: list[Any] | None = None) -> None:
        self.size, self.drawn, self.buffer = size, drawn, front or []

    def get_samples(self, count: int) -> list[Any]:
        groups, self.buffer = self.buffer[:count], self.buffer[count:]
        while len(groups) < count:
            first = self.drawn * self.size
            groups.append([Sample(group_index=self.drawn, index=first + i, prompt="p") for i in range(self.size)])
            self.drawn += 1
        return groups

    def add_samples(self, groups: list[Any]) -> None:
        self.buffer += groups


class World:
    """One run. ``made_at[serial]`` is the step at which a token was really made; a token is its serial number."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        rng = self.rng = random.Random(seed)
        self.interval = rng.choice([1, 1, 1, 2, 3])
        self.limit = rng.choice([None, *range(self.interval - 1, self.interval + 3)])
        self.masks, self.says_spans = rng.random() < 0.3, rng.random() < 0.7
        self.ahead = rng.random() < 0.8
        self.mean_s = rng.choice([0.1, 1.0, 10.0, 60.0])
        self.trouble_share, self.drop_share = rng.choice([0.0, 0.05]), rng.choice([0.0, 0.0, 0.3, 0.7])
        self.restart_share, self.eval_share = rng.choice([0.0, 0.2]), rng.choice([0.0, 0.3])
        self.slots = rng.choice([2, 5, 16, 64])
        batch, size = rng.choice([1, 3, 4, 8]), rng.choice([1, 2, 3])
        self.args = rollout_args(
            max_staleness=self.limit, sglang_server_concurrency=self.slots, rollout_num_engines=1,
            rollout_request_timeout=1e9, max_prompt_attempts=1000, rollout_batch_size=batch, n_samples_per_prompt=size,
            partial_rollout=self.masks or rng.random() < 0.3, mask_offpolicy_in_partial_rollout=self.masks,
        )  # fmt: skip
        self.made_at: list[int] = []
        self.trouble: Counter[int] = Counter()
        self.lags: Counter[int] = Counter()
        self.dropped: list[int] = []
        self.consumed: list[int] = []
        self.version = self.step = 0
        monkeypatch.setattr(group_stream, "weight_clock", lambda: self.clock)
        monkeypatch.setattr(sglang_rollout, "GenerateState", lambda args: self.state)
        monkeypatch.setattr(sglang_rollout, "generate_and_rm_group", self.generate_group)
        monkeypatch.setattr(fully_async_rollout.logger, "disabled", True)

    # The engines

    async def generate_group(self, args: Any, group: list[Any], params: Any, evaluation: bool = False) -> list[Any]:
        return await gather_or_cancel([self.generate(sample) for sample in group])

    async def generate(self, sample: Sample) -> Sample:
        if self.masks and sample.response_length:  # as generate_and_rm does
            sample.loss_mask = [0] * sample.response_length
        if sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
            return sample
        async with self.state.semaphore:
            count = self.rng.randint(1, 5)
            pause = self.rng.lognormvariate(0.0, 1.0) * self.mean_s / count
            serials, versions = [], []
            for _ in range(count):
                await asyncio.sleep(pause)
                serials.append(len(self.made_at))
                self.made_at.append(self.step)
                versions.append(self.version)
        fate = self.rng.random()
        if fate < self.trouble_share and self.trouble[sample.group_index or 0] < 2:
            self.trouble[sample.group_index or 0] += 1
            raise ValueError("an accident")
        meta: dict[str, Any] = {
            "finish_reason": {"type": "abort" if fate > 1 - self.trouble_share else "stop"},
            "weight_version": str(versions[-1]),
        }
        if self.says_spans:
            meta["weight_versions"] = [
                {"version": str(v), "start": versions.index(v), "end": versions.index(v) + n}
                for v, n in sorted(Counter(versions).items())
            ]
        sample.append_response_tokens(tokens=serials, log_probs=[0.0] * count, meta_info=meta)
        sample.reward = 0.0
        return sample

    def keep(self, args: Any, group: list[Any], **_: Any) -> bool:
        kept = self.rng.random() >= self.drop_share
        if not kept:
            self.dropped.append(group[0].group_index)
        return kept

    # The run

    def begin(self, step: int, source: Source) -> None:
        """A process starts: version numbers begin again."""
        self.clock, self.version, self.step, self.source = WeightClock(), 1, step, source
        self.clock.publish(1, step)
        self.state = SimpleNamespace(
            semaphore=asyncio.Semaphore(self.slots), sampling_params={}, rollout_id=None, reward_errors=RewardErrors()
        )
        self.args.start_rollout_id = step
        self.worker = AsyncRolloutWorker(self.args, source)
        self.worker._filter = self.keep  # type: ignore[assignment]

    async def push(self, step: int) -> None:
        self.version, self.step = self.version + 1, step
        await asyncio.sleep(self.rng.choice([0.0, 0.01, 5.0]))
        self.clock.publish(self.version, step)

    async def run(self, rollouts: int) -> None:
        self.begin(0, Source(self.args.n_samples_per_prompt))
        rollout_id = 0
        upcoming = self.start(0)
        while rollout_id < rollouts:
            output = await asyncio.wait_for(upcoming, STUCK_S)
            self.account(rollout_id, output.samples)
            saved = self.save()
            if self.ahead:
                upcoming = self.start(rollout_id + 1)
            await asyncio.sleep(self.rng.lognormvariate(0.0, 0.7) * self.rng.choice([0.1, 1.0, 10.0]))
            if self.rng.random() < self.restart_share:
                upcoming = await self.restart(rollout_id, saved, upcoming)
            else:
                if (rollout_id + 1) % self.interval == 0:
                    await self.push(rollout_id + 1)
                if self.rng.random() < self.eval_share:
                    await self.evaluate()
                if not self.ahead:
                    upcoming = self.start(rollout_id + 1)
            rollout_id += 1
        if upcoming.done():
            self.account(rollout_id, upcoming.result().samples)
        await self.end(upcoming)
        left = await self.worker.close()
        everything = Counter([*self.consumed, *self.dropped, *(g[0].group_index for g in [*left, *self.source.buffer])])
        assert set(everything.values()) == {1}, "nothing is consumed twice"
        assert set(everything) == set(range(self.source.drawn)), "nothing is lost"

    def start(self, rollout_id: int) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.worker.rollout(rollout_id))

    async def end(self, upcoming: asyncio.Future[Any]) -> None:
        upcoming.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await upcoming

    def save(self) -> str:
        """Return a checkpoint, as the rollout manager saves it after a rollout."""
        open_groups = still_open(self.worker.to_save(), {"sample_group_index": self.source.drawn}, self.source.buffer)
        buffer = [with_all_steps(group, self.clock) for group in self.source.buffer]
        front = [encode_group(group) for group in [*open_groups, *buffer]]
        return json.dumps({"front": front, "drawn": self.source.drawn, "dropped": self.dropped})

    async def restart(self, rollout_id: int, saved: str, upcoming: asyncio.Future[Any]) -> asyncio.Future[Any]:
        """The process is killed after the checkpoint of ``rollout_id``, and another one resumes it."""
        await self.end(upcoming)
        await self.worker.close()
        state = json.loads(saved)
        self.dropped = state["dropped"]
        front = [decode_group(group) for group in state["front"]]
        self.begin(rollout_id + 1, Source(self.args.n_samples_per_prompt, state["drawn"], front))
        return self.start(rollout_id + 1)

    async def evaluate(self) -> None:
        """Prompts that wait for slots, all at once."""

        async def one() -> None:
            async with self.state.semaphore:
                await asyncio.sleep(self.rng.random() * self.mean_s)

        await asyncio.wait_for(gather_or_cancel([one() for _ in range(20)]), STUCK_S)

    def account(self, rollout_id: int, groups: list[Any]) -> None:
        assert len(groups) == self.args.rollout_batch_size
        self.consumed += [group[0].group_index for group in copy_group(groups)]
        for sample in iter_samples(groups):
            assert sample.status == Sample.Status.COMPLETED
            truth = [self.made_at[token] for token in sample.tokens]
            mask = sample.loss_mask or [1] * len(truth)
            trained = [step for step, trains in zip(truth, mask, strict=True) if trains]
            self.lags.update(rollout_id - step for step in trained)
            if self.masks:
                assert set(trained) <= {truth[-1]}, "only the newest weights of a response are trained on"
            for span in sample.weight_version_spans:
                true = truth[span["start"] : span["end"]]
                step = span.get("step", min(true))
                assert step <= min(true), "no token counts as younger than it is"
                assert span.get("at_end") or self.restart_share or step == min(true) == max(true)
        if self.limit is not None:
            assert max(self.lags, default=0) <= self.limit


def run_world(seed: int, monkeypatch: pytest.MonkeyPatch, rollouts: int) -> World:
    world = World(seed, monkeypatch)
    run_virtually(world.run(rollouts))
    return world


@pytest.mark.parametrize("seed", [*range(20), *range(100, 115)])
def test_random_runs_keep_the_bound_lose_nothing_and_continue(monkeypatch, seed):
    run_world(seed, monkeypatch, rollouts=12)


@pytest.mark.soak
def test_random_runs_over_ten_thousand_groups(monkeypatch):
    groups = 0
    for seed in range(100, 400):
        try:
            groups += len(run_world(seed, monkeypatch, rollouts=25).consumed)
        except BaseException as e:
            e.add_note(f"seed {seed}")
            raise
    assert groups >= 10_000, groups
    print(f"{groups} groups")
