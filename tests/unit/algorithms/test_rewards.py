"""Reward normalization: groups by explicit index, whatever their sizes and order."""

from __future__ import annotations

import random
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.algorithms.rewards import (
    leave_one_out,
    normalize_by_group,
    normalize_rewards,
    post_process_rewards,
    preference_rewards,
)
from slime.rollout.rm_hub.preference import group_reward
from slime.utils.types import Sample


def make_args(**flags: Any) -> SimpleNamespace:
    defaults = {
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "n_samples_per_prompt": 2,
        "rollout_batch_size": 2,
        "reward_key": None,
        "reward_statistics": "trajectories",
    }
    return SimpleNamespace(**{**defaults, **flags})


def make_samples(rewards: list[Any], groups: list[int | None]) -> list[Sample]:
    return [Sample(index=i, group_index=g, reward=r) for i, (r, g) in enumerate(zip(rewards, groups, strict=True))]


def brute_force(rewards: list[float], groups: list[int], std: bool) -> list[float]:
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        value = reward - statistics.fmean(peers)
        if std:
            value = value / (statistics.stdev(peers) + 1e-6) if len(peers) > 1 else 0.0
        result.append(value)
    return result


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline", "rloo"])
def test_nothing_is_compared_with_a_reward_that_failed(estimator: str) -> None:
    """Its 0 is none: without it the other two are equal and teach nothing; where they differ, it changes nothing."""
    args = make_args(advantage_estimator=estimator, n_samples_per_prompt=3)
    for rewards in ([1.0, 1.0], [1.0, 3.0]):
        samples = make_samples([*rewards, 0.0], [5, 5, 5])
        samples[2].remove_sample, samples[2].metadata = True, {"reward_error": "TimeoutError: no answer"}
        assert normalize_rewards(args, samples) == [*normalize_rewards(args, make_samples(rewards, [5, 5])), 0.0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 4)), min_size=1, max_size=20), st.booleans())
def test_any_group_sizes_in_any_order(rows, std: bool) -> None:
    # multiples of 1/8 are exact, so equal rewards are equal whatever the order of summation
    rewards, groups = [round(r * 8) / 8 for r, _ in rows], [g for _, g in rows]
    actual = normalize_by_group(rewards, groups, divide_by_std=std)
    assert actual == pytest.approx(brute_force(rewards, groups, std), abs=1e-10)
    order = list(range(len(rows)))
    random.Random(1).shuffle(order)
    permuted = normalize_by_group([rewards[i] for i in order], [groups[i] for i in order], divide_by_std=std)
    assert permuted == pytest.approx([actual[i] for i in order], abs=1e-10)


def left_out(rewards: list[float], groups: list[int], ids: list[int | None]) -> list[float]:
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others: dict[Any, list[float]] = {}
        for j, (other, g) in enumerate(zip(rewards, groups, strict=True)):
            same = j == i or (ids[i] is not None and ids[j] == ids[i])
            if g == group and not same:
                others.setdefault((ids[j],) if ids[j] is not None else (None, j), []).append(other)
        baselines = [statistics.fmean(peers) for peers in others.values()]
        result.append(reward - statistics.fmean(baselines) if baselines else 0.0)
    return result


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-10, 10), st.integers(0, 3), st.sampled_from([None, None, 0, 1, 2])),
        min_size=1, max_size=20,
    )
)  # fmt: skip
def test_leave_one_out_leaves_out_the_whole_trajectory(rows) -> None:
    rewards, groups, ids = map(list, zip(*rows, strict=True))
    assert leave_one_out(rewards, groups, ids) == pytest.approx(left_out(rewards, groups, ids), abs=1e-10)


def test_leave_one_out_of_plain_groups_is_the_scaled_difference_to_the_mean() -> None:
    assert leave_one_out([1.0, 0.0, 0.0, 5.0], [0, 0, 0, 1]) == [1.0, -0.5, -0.5, 0.0]


trajectories = st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=10)
"""(reward, group, number of samples) of every trajectory."""


@settings(max_examples=100, deadline=None)
@given(trajectories, st.booleans(), st.randoms())
def test_a_trajectory_counts_once_however_many_samples_it_has(rows, std: bool, random_: random.Random) -> None:
    rows = [(round(reward * 8) / 8, group, count) for reward, group, count in rows]
    expected = brute_force([r for r, _, _ in rows], [g for _, g, _ in rows], std)
    samples = [(i, reward, group) for i, (reward, group, count) in enumerate(rows) for _ in range(count)]
    random_.shuffle(samples)
    ids, rewards, groups = map(list, zip(*samples, strict=True))
    actual = normalize_by_group(rewards, groups, ids, divide_by_std=std)
    assert actual == pytest.approx([expected[i] for i in ids], abs=1e-9)
    alone = [reward for reward, _, _ in rows], [group for _, group, _ in rows]
    # a run without fan-out: the same numbers to the bit, with ids of its own or without any
    assert normalize_by_group(*alone, range(len(rows)), divide_by_std=std) == normalize_by_group(
        *alone, divide_by_std=std
    )
    by_sample = normalize_by_group(rewards, groups, divide_by_std=std)
    assert by_sample == pytest.approx(brute_force(rewards, groups, std), abs=1e-9)


def test_what_statistics_are_over_is_a_flag() -> None:
    """Trajectory 0 has three samples: mean 1/2 over trajectories, 1/4 over samples."""
    samples = make_samples([0.0, 0.0, 0.0, 1.0], [5] * 4)
    for sample, rollout_id in zip(samples, [0, 0, 0, 1], strict=True):
        sample.rollout_id = rollout_id
    args = make_args(grpo_std_normalization=False)
    assert normalize_rewards(args, samples) == [-0.5, -0.5, -0.5, 0.5]
    args.reward_statistics = "samples"
    assert normalize_rewards(args, samples) == [-0.25, -0.25, -0.25, 0.75]


def test_samples_of_a_trajectory_with_rewards_of_their_own() -> None:
    # means of trajectories 1 and 4 -> 2.5; variance (mean of 2.5^2 and 0.5^2, plus 1.5^2) / (2 - 1) = 5.5
    found = normalize_by_group([0.0, 2.0, 4.0], [1, 1, 1], [7, 7, 8], divide_by_std=True)
    assert found == pytest.approx([x / (5.5**0.5 + 1e-6) for x in (-2.5, -0.5, 1.5)])
    # a group of one trajectory, whose agents are rewarded one by one: they are compared with each other
    assert normalize_by_group([0.0, 2.0], [1, 1], [7, 7], divide_by_std=False) == [-1.0, 1.0]


def test_preference_rewards_by_hand() -> None:
    """Cheap and quick, by weights 1 and 2; all call `search` once, which says nothing."""
    features = [
        {"accuracy": 1, "-cost": -1.0, "-latency": -8.0, "search": 1},
        {"accuracy": 1, "-cost": -5.0, "-latency": -2.0, "search": 1},
        {"accuracy": 0, "-cost": -3.0, "-latency": -4.0, "search": 1},
    ]
    preferences = {"-cost": 1.0, "-latency": 2.0, "accuracy": 0.5, "search": 9.0}
    # accuracy spans 0..1, cost -5..-1, latency -8..-2
    assert preference_rewards(features, preferences, [True, True, False]) == pytest.approx([1.0 + 0.5, 2.0 + 0.5, 0.0])
    assert preference_rewards(features, preferences, [False] * 3) == [0.0] * 3
    assert preference_rewards(features[:1], preferences, [True]) == [0.0]
    with pytest.raises(ValueError, match=r"preferences name \['taste'\]"):
        preference_rewards(features, {"taste": 1.0}, [True] * 3)
    with pytest.raises(ValueError, match="execution 1 has the features"):
        preference_rewards([features[0], {"accuracy": 1}], {}, [True] * 2)


def three(bound: float) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(-bound, bound), min_size=3, max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), three(4.0), st.integers(1, 3)), min_size=1, max_size=6),
    three(2.0),
)
def test_preference_rewards_of_fan_outs(executions, weights) -> None:
    """``--group-rm`` over nested samples, against the formula written out; features nearly equal are made equal."""
    rows = [(right, [round(x, 3) for x in values], count) for right, values, count in executions]
    expected = []
    for right, values, count in rows:
        total = 0.0
        for f in range(3):
            column = [other[f] for _, other, _ in rows]
            if max(column) != min(column):
                total += weights[f] * (values[f] - min(column)) / (max(column) - min(column))
        expected += [total if right else 0.0] * count
    preferences = dict(zip("abc", weights, strict=True))
    group = []
    for right, values, count in rows:
        metadata = {"features": dict(zip("abc", values, strict=True)), "preferences": preferences, "correct": right}
        group.append([Sample(metadata=metadata) for _ in range(count)])
    assert group_reward(None, group) == pytest.approx(expected, abs=1e-9)


def test_group_reward_names_the_sample_that_lacks_something() -> None:
    ungraded = {"features": {"a": 1.0}, "preferences": {"a": 1.0}}
    whole = {**ungraded, "correct": True}
    with pytest.raises(ValueError, match=r"sample index=4: metadata has no \['correct'\]"):
        group_reward(None, [Sample(metadata=whole), Sample(index=4, metadata=ungraded)])
    with pytest.raises(ValueError, match=r"sample index=5: preferences differ"):
        group_reward(None, [Sample(metadata=whole), Sample(index=5, metadata={**whole, "preferences": {"a": 2.0}})])


def test_uneven_groups_do_not_collapse_into_one() -> None:
    # three rewards of 5 for one prompt and 0, 1 for another: no signal from the first group
    samples = make_samples([5.0, 0.0, 5.0, 1.0, 5.0], [0, 1, 0, 1, 0])
    half = 0.5 / (0.5**0.5 + 1e-6)
    assert normalize_rewards(make_args(), samples) == pytest.approx([0, -half, 0, half, 0])


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-9, 1e9])
def test_equal_rewards_give_exactly_zero(value: float) -> None:
    assert normalize_by_group([value] * 7, [3] * 7, divide_by_std=True) == [0.0] * 7


def test_group_of_one_gives_zero() -> None:
    assert normalize_by_group([4.0], [0], divide_by_std=True) == [0.0]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"advantage_estimator": "grpo"}, [1 / (2**0.5 + 1e-6), -1 / (2**0.5 + 1e-6)]),
        ({"advantage_estimator": "gspo"}, [1 / (2**0.5 + 1e-6), -1 / (2**0.5 + 1e-6)]),
        ({"advantage_estimator": "cispo"}, [1 / (2**0.5 + 1e-6), -1 / (2**0.5 + 1e-6)]),
        ({"advantage_estimator": "grpo", "grpo_std_normalization": False}, [1, -1]),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, [1, -1]),
        ({"advantage_estimator": "rloo"}, [2, -2]),
        ({"advantage_estimator": "rloo", "rewards_normalization": False}, [3, 1]),
        ({"advantage_estimator": "reinforce_plus_plus"}, [3, 1]),
        ({"advantage_estimator": "ppo"}, [3, 1]),
        ({"advantage_estimator": "grpo", "rewards_normalization": False}, [3, 1]),
    ],
)
def test_rules_of_the_estimators(flags: dict[str, Any], expected: list[float]) -> None:
    samples = make_samples([3.0, 1.0], [7, 7])
    assert normalize_rewards(make_args(**flags), samples) == pytest.approx(expected)


def test_reward_key_selects_the_raw_reward_too() -> None:
    samples = make_samples([{"score": 2.0}, {"score": 0.0}], [0, 0])
    raw, rewards = post_process_rewards(make_args(reward_key="score", grpo_std_normalization=False), samples)
    assert raw == [2.0, 0.0]
    assert rewards == [1.0, -1.0]


def test_without_indices_only_a_full_rollout_has_known_groups() -> None:
    args = make_args(grpo_std_normalization=False)
    assert normalize_rewards(args, make_samples([1, 3, 5, 5], [None] * 4)) == [-1.0, 1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"6 of 6 samples have no group_index .*Set group_index"):
        normalize_rewards(args, make_samples([1.0] * 6, [None] * 6))
    with pytest.raises(ValueError, match=r"1 of 4 samples have no group_index .first: position 2, index=2"):
        normalize_rewards(args, make_samples([1.0] * 4, [0, 0, None, 1]))


@pytest.mark.parametrize("reward", [None, float("nan"), float("-inf"), {"score": 1}, "high"])
def test_rewards_that_are_no_numbers_are_named(reward: Any) -> None:
    samples = make_samples([1.0, reward], [4, 4])
    with pytest.raises(ValueError, match=r"sample index=1 group_index=4 \(status pending\): reward .* finite number"):
        normalize_rewards(make_args(), samples)
