"""Rewards of groups: what custom functions are given, and the forms in which they may answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slime.rollout import sglang_rollout
from slime.rollout.rm_hub import batched_async_rm, rewards_of
from slime.rollout.rm_hub.errors import RewardErrors
from slime.rollout.rm_hub.failure import BadReward
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.support.arguments import run_args
from tests.support.rollout_args import CharTokenizer, rollout_args

HERE = __name__


def nested() -> list[Any]:
    """A group of three trajectories, two of which made several samples."""
    return [[Sample(index=0), Sample(index=1)], Sample(index=2), [[Sample(index=3)], [Sample(index=4)]]]


def leaves(value: Any) -> list[Any]:
    return [leaf for one in value for leaf in leaves(one)] if isinstance(value, list) else [value]


def shape(value: Any) -> Any:
    return [shape(one) for one in value] if isinstance(value, list) else type(value).__name__


def custom(name: str) -> Any:
    return rollout_args(custom_rm_path=f"{HERE}.{name}", group_rm=True)


given: list[Any] = []


async def per_sample(args: Any, samples: Any, **kwargs: Any) -> Any:
    given.append(samples)
    return [float(sample.index) for sample in leaves(samples)]


async def as_nested(args: Any, samples: Any, **kwargs: Any) -> Any:
    return [[0.0, 1.0], 2.0, [[3.0], (4.0,)]]


async def per_trajectory(args: Any, samples: Any, **kwargs: Any) -> Any:
    return np.array([10.0, 20.0, 30.0])


async def set_by_itself(args: Any, samples: Any, **kwargs: Any) -> None:
    for sample in leaves(samples):
        sample.reward = {"score": float(sample.index)}


def set_by_itself_in_a_thread(args: Any, samples: Any, **kwargs: Any) -> None:
    for sample in leaves(samples):
        sample.reward = float(sample.index)


async def forgets_one(args: Any, samples: Any, **kwargs: Any) -> None:
    for sample in leaves(samples)[:-1]:
        sample.reward = 1.0


async def test_a_custom_function_is_given_the_group_as_it_is() -> None:
    given.clear()
    group = nested()
    assert await batched_async_rm(custom("per_sample"), group) == [0.0, 1.0, 2.0, 3.0, 4.0]  # as it answered
    await RewardErrors().score_batch(custom("per_sample"), group, batched_async_rm)
    assert [one is group for one in given] == [True, True]
    assert shape(given[0]) == [["Sample", "Sample"], "Sample", [["Sample"], ["Sample"]]]


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("per_sample", [0.0, 1.0, 2.0, 3.0, 4.0]),
        ("as_nested", [0.0, 1.0, 2.0, 3.0, 4.0]),
        ("per_trajectory", [10.0, 10.0, 20.0, 30.0, 30.0]),
        ("set_by_itself", [{"score": float(n)} for n in range(5)]),
        ("set_by_itself_in_a_thread", [0.0, 1.0, 2.0, 3.0, 4.0]),
    ],
)
async def test_every_form_of_an_answer_reaches_its_samples(name: str, rewards: list[Any]) -> None:
    group = nested()
    errors = RewardErrors()
    await errors.score_batch(custom(name), group, batched_async_rm)
    assert [sample.reward for sample in leaves(group)] == rewards
    assert (errors.scored, errors.failed) == (5, [])


async def test_rewards_that_a_function_has_set_are_returned_in_the_nesting_of_the_group() -> None:
    found = await batched_async_rm(custom("set_by_itself_in_a_thread"), nested())
    assert found == [[0.0, 1.0], 2.0, [[3.0], [4.0]]]
    flat = [Sample(index=7), Sample(index=8)]
    assert await batched_async_rm(custom("set_by_itself_in_a_thread"), flat) == [7.0, 8.0]


async def test_samples_without_a_common_reward_are_scored_one_by_one_in_their_nesting() -> None:
    group = nested()
    for sample in leaves(group):
        sample.response, sample.label = f"\\boxed{{{sample.index % 2}}}", "1"
    assert await batched_async_rm(rollout_args(rm_type="math"), group) == [[0, 1], 0, [[1], [0]]]
    group[1].custom_rm_path = f"{HERE}.alone"
    given.clear()
    assert await batched_async_rm(custom("per_sample"), group) == [[0.0, 1.0], -1.0, [[3.0], [4.0]]]
    assert [sample.index for sample in given[0]] == [0, 1, 3, 4]  # the others, one after the other


async def alone(args: Any, sample: Any, **kwargs: Any) -> float:
    return -1.0


@pytest.mark.parametrize(
    ("returned", "seen"),
    [
        (None, r"got None, and left \[0, 1, 2, 3, 4\] without one"),
        ([1.0, 2.0], r"got \[1\.0, 2\.0\]"),
        ([[1.0], 2.0, [[3.0], [4.0]]], r"got \[\[1\.0\], 2\.0"),
        (1.0, "got 1.0"),
        ({"score": 1.0}, "got {'score': 1.0}"),
        ("12345", "got '12345'"),
    ],
)
def test_other_answers_are_refused_with_the_samples(returned: Any, seen: str) -> None:
    said = rf"--custom-rm-path .*per_sample.* was given 5 samples \(indices \[0, 1, 2, 3, 4\]\) .*{seen}"
    with pytest.raises(BadReward, match=said):
        rewards_of(custom("per_sample"), nested(), returned)


async def test_a_function_that_forgets_a_sample_stops_the_run() -> None:
    with pytest.raises(BadReward, match=r"None, and left \[4\] without one"):
        await RewardErrors().score_batch(custom("forgets_one"), nested(), batched_async_rm)


async def test_the_group_of_a_rollout_arrives_as_generate_functions_made_it(monkeypatch: Any) -> None:
    """Every second sample becomes two of one trajectory."""
    given.clear()
    SingletonMeta.clear_instances()
    monkeypatch.setattr(sglang_rollout, "load_tokenizer", lambda *a, **k: CharTokenizer())

    async def fan_out(args: Any, sample: Sample, params: Any, evaluation: bool = False) -> Any:
        sample.status = Sample.Status.COMPLETED
        if sample.index % 2:
            return [Sample(index=sample.index + n, rollout_id=sample.index, status=sample.status) for n in (0, 10)]
        return sample

    monkeypatch.setattr(sglang_rollout, "generate", fan_out)
    group = await sglang_rollout.generate_and_rm_group(custom("per_sample"), [Sample(index=0), Sample(index=1)], {})
    assert shape(given[0]) == shape(group) == ["Sample", ["Sample", "Sample"]]
    assert [sample.reward for sample in leaves(group)] == [0.0, 1.0, 11.0]
    SingletonMeta.clear_instances()


def test_arrays_of_one_number_are_no_lists() -> None:
    group = [Sample(index=0), [Sample(index=1), Sample(index=2)]]
    args = run_args(custom_rm_path=f"{HERE}.per_sample")
    assert rewards_of(args, group, [np.float64(1), np.array(2.0)]) == [1.0, 2.0, 2.0]


@pytest.mark.parametrize("returned", [[[1.0], [2.0]], [1.0, 2.0], None])
def test_a_group_in_which_every_list_has_one_sample(returned: Any) -> None:
    group = [[Sample(index=0, reward=1.0)], [Sample(index=1, reward=2.0)]]
    assert rewards_of(run_args(custom_rm_path=f"{HERE}.per_sample"), group, returned) == [1.0, 2.0]
