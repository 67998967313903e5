"""Rewards that a rollout left behind, and the responses that they are of."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import pytest

from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.rm_hub.errors import RewardErrors
from slime.rollout.rm_hub.failure import TooManyRewardFailures
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.utils.async_utils import run
from slime.utils.types import Sample
from tests.support.arguments import run_args

HERE = __name__
MADE: list[int | None] = []
REGENERATED, OVER = threading.Event(), threading.Event()


@pytest.fixture(autouse=True)
def anew():
    MADE.clear()
    REGENERATED.clear()
    OVER.clear()
    yield
    OVER.set()


async def numbered(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Every generation writes another response."""
    MADE.append(sample.index)
    if MADE.count(sample.index) > 1:
        REGENERATED.set()
    sample.tokens = [112, 48]
    sample.append_response_tokens(tokens=[len(MADE)], log_probs=[-0.1], text=f"r{len(MADE)}")
    sample.status = Sample.Status.COMPLETED
    return sample


async def grade(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """The second group is graded when its second responses are there, the others after it at once or never."""
    response, event = sample.response, {0: None, 1: REGENERATED}.get(sample.group_index, OVER)
    while event is not None and not event.is_set():
        await asyncio.sleep(0.001)
    return {"of": response, "score": 1.0}


async def grade_all(args: Any, samples: list[Sample], **kwargs: Any) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*(grade(args, sample) for sample in samples)))


@pytest.mark.parametrize("group_rm", [False, True])
def test_a_response_that_begins_again_is_not_given_the_reward_of_the_old_one(cluster, make_args, group_rm):
    args = make_args(
        partial_rollout=True, mask_offpolicy_in_partial_rollout=True, rollout_batch_size=1, over_sampling_batch_size=2,
        custom_generate_function_path=f"{HERE}.numbered", reward_key="score", group_rm=group_rm,
        custom_rm_path=f"{HERE}.grade_all" if group_rm else f"{HERE}.grade",
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    generate_rollout(args, 0, source)
    assert [(s.status, s.reward) for s in iter_samples(source.buffer)] == [(Sample.Status.COMPLETED, None)] * 2
    output = generate_rollout(args, 1, source)
    assert output.metrics["rollout/staleness/regenerated_groups"] == 1
    assert [sample.index for sample in iter_samples(output.samples)] == [2, 3]
    for sample in iter_samples(output.samples):
        assert sample.reward["of"] == sample.response


async def fail_late(args: Any, sample: Sample, **kwargs: Any) -> float:
    """The second group's reward fails when ``args.fails`` is set; the others come at once or, in later groups, not."""
    event = {0: None, 1: args.fails}.get(sample.group_index, OVER)
    while event is not None and not event.is_set():
        await asyncio.sleep(0.001)
    if sample.group_index == 1:
        raise ValueError("the judge went away")
    return 1.0


def leave_one_behind(make_args: Any, **changes: Any) -> tuple[Any, RolloutDataSourceWithBuffer]:
    """Return what there is after a rollout that left the rewards of group 1 behind."""
    args = make_args(
        partial_rollout=True, rollout_batch_size=1, over_sampling_batch_size=2, custom_rm_path=f"{HERE}.fail_late",
        custom_generate_function_path=f"{HERE}.numbered", **changes,
    )  # fmt: skip
    args.fails = threading.Event()
    source = RolloutDataSourceWithBuffer(args)
    metrics = generate_rollout(args, 0, source).metrics
    assert (metrics["rollout/reward/left_behind"], metrics["rollout/reward/failures"]) == (2, 0)
    return args, source


def wait_until_failed(args: Any) -> None:
    args.fails.set()
    deadline = time.monotonic() + 30
    while len(GenerateState(args).late_failures) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("fails", ["between the rollouts", "while it is waited for"])
def test_a_reward_that_fails_after_its_rollout_counts_in_the_one_that_the_sample_returns_to(cluster, make_args, fails):
    args, source = leave_one_behind(make_args)
    if fails == "between the rollouts":
        wait_until_failed(args)
    else:
        threading.Timer(0.05, args.fails.set).start()
    output = generate_rollout(args, 1, source)
    assert [sample.index for sample in iter_samples(output.samples)] == [2, 3]
    assert all(sample.remove_sample for sample in iter_samples(output.samples))
    assert output.metrics["rollout/reward/failures"] == output.metrics["rollout/reward/failures/raised"] == 2
    assert not len(GenerateState(args).late_failures)


def test_late_failures_are_tolerated_as_others_are(cluster, make_args):
    args, source = leave_one_behind(make_args, reward_failure_tolerance=0.0)
    wait_until_failed(args)
    with pytest.raises(TooManyRewardFailures, match="the judge went away"):
        generate_rollout(args, 1, source)


def test_failures_of_samples_that_never_return_are_forgotten(cluster, make_args):
    args, source = leave_one_behind(make_args)
    wait_until_failed(args)
    late = GenerateState(args).late_failures
    source.buffer.clear()
    deadline = time.monotonic() + 30
    while len(late):
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.002)


class Watched(Sample):
    """Remembers how it looked after each change."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__.setdefault("looks", []).append((self.__dict__.get("reward"), self.__dict__.get("remove_sample")))


def test_who_saves_a_sample_meanwhile_never_finds_a_failed_reward_to_train_on():
    """The data source is saved on another thread than that on which rewards fail."""
    sample = Watched(index=3)

    async def fail(args: Any, sample: Sample) -> float:
        raise ValueError("the judge went away")

    run(RewardErrors().score_one(run_args(rm_type="f1"), sample, fail))
    assert (sample.reward, sample.remove_sample) == (0.0, True)
    assert (0.0, False) not in sample.looks
