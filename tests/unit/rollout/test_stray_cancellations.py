"""Cancellations that come from within: no caller here asked for them, so they are failures like any other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slime.rollout import fully_async_rollout, group_stream, sglang_rollout
from slime.rollout.cancelling import cancel_all
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from slime.rollout.rm_hub.errors import RewardErrors
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.staleness import WeightClock
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args

HERE = __name__
CALLS: list[Any] = []
ROLLOUTS = pytest.mark.parametrize("rollout", [generate_rollout, generate_rollout_fully_async])


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    CALLS.clear()
    monkeypatch.setattr(group_stream, "weight_clock", WeightClock)
    yield
    fully_async_rollout.stop_global_worker()


async def watched() -> None:
    """Await a task that a watchdog cancels."""
    task = asyncio.create_task(asyncio.Event().wait())
    asyncio.get_running_loop().call_soon(task.cancel)
    await task


async def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    if (sample.index or 0) % 2:
        await watched()
    return 1.0


async def rewards(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    return [await reward(args, sample) for sample in samples]


@ROLLOUTS
@pytest.mark.parametrize("group_rm", [False, True])
def test_one_of_a_reward_costs_its_samples_and_a_counter(cluster, make_args, monkeypatch, rollout, group_rm):
    monkeypatch.setattr(sglang_rollout, "async_rm", reward)
    monkeypatch.setattr(sglang_rollout, "batched_async_rm", rewards)
    args = make_args(
        group_rm=group_rm, custom_rm_path=f"{HERE}.rewards" if group_rm else None, reward_failure_tolerance=1.0
    )
    output = rollout(args, 0, RolloutDataSourceWithBuffer(args))
    for group in output.samples:
        indices = [sample.index for sample in group]
        lost = indices if group_rm else [index for index in indices if index % 2]
        assert [sample.index for sample in group if sample.remove_sample] == lost
        said = f"RuntimeError: the reward of samples {lost} was cancelled unexpectedly"
        assert {sample.metadata.get("reward_error") for sample in group} == {said, *([] if group_rm else [None])}
    assert output.metrics["rollout/reward/failures"] >= (8 if group_rm else 4)


async def test_a_reward_whose_caller_is_cancelled_is_no_failure():
    async def never(args: Any, sample: Sample) -> float:
        return await asyncio.Event().wait()

    errors, sample = RewardErrors(), Sample(index=0)
    task = asyncio.create_task(errors.score_one(rollout_args(), sample, never))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (errors.failed, sample.remove_sample) == ([], False)


def repeat(rollout: Any, args: Any, source: Any) -> None:
    for rollout_id in range(10):
        rollout(args, rollout_id, source)


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    CALLS.append(sample.index)
    if sample.index == 3:
        await watched()
    return await sglang_rollout.generate(args, sample, sampling_params)


@ROLLOUTS
def test_one_of_a_generate_function_names_it_and_ends_the_run(cluster, make_args, rollout):
    args = make_args(custom_generate_function_path=f"{HERE}.generate", prompts=100)
    source = RolloutDataSourceWithBuffer(args)
    with pytest.raises(RuntimeError, match=rf"{HERE}.generate.* for sample.*3.*though it was not cancelled"):
        repeat(rollout, args, source)
    assert CALLS.count(3) <= 3


async def generate_group(args: Any, group: list[Sample], sampling_params: Any, evaluation: bool = False) -> Any:
    CALLS.append(group[0].group_index)
    if group[0].group_index == 1:
        await watched()
    for sample in group:
        await sglang_rollout.generate_and_rm(args, sample, sampling_params)
    return group


@ROLLOUTS
def test_one_of_a_whole_group_ends_the_run_and_the_group_is_kept(cluster, make_args, monkeypatch, rollout):
    monkeypatch.setattr(sglang_rollout, "generate_and_rm_group", generate_group)
    args = make_args(prompts=100)
    source = RolloutDataSourceWithBuffer(args)
    with pytest.raises(RuntimeError, match="cancelled unexpectedly") as caught:
        repeat(rollout, args, source)
    assert any("(samples [2, 3])" in note for note in caught.value.__notes__)
    assert CALLS.count(1) == (1 if rollout is generate_rollout else 3)
    kept = source.buffer
    if rollout is generate_rollout_fully_async:
        kept = fully_async_rollout.get_global_worker(args, source).unconsumed()
    assert 1 in [group[0].group_index for group in kept]


@pytest.mark.parametrize("raises", [False, True])
async def test_a_reward_that_keeps_its_cancellation_to_itself_counts_for_nothing(raises, caplog):
    async def stubborn(args: Any, sample: Sample) -> float:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if raises:
                raise ValueError("the connection is closed") from None
        return 1.0

    errors, sample = RewardErrors(), Sample(index=0)
    task = asyncio.create_task(errors.score_one(rollout_args(), sample, stubborn))
    await asyncio.sleep(0)
    await cancel_all([task])
    assert task.cancelled()
    assert (errors.failed, sample.reward, sample.remove_sample, caplog.records) == ([], None, False, [])
