"""Reward normalisation: groups by explicit index, whatever their sizes and order."""

from __future__ import annotations

import random
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.algorithms.rewards import leave_one_out, normalize_by_group, normalize_rewards, post_process_rewards
from slime.utils.types import Sample


def make_args(**flags: Any) -> SimpleNamespace:
    defaults = {
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "n_samples_per_prompt": 2,
        "rollout_batch_size": 2,
        "reward_key": None,
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
