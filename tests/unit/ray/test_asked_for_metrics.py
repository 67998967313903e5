"""Pass rates and multi-turn metrics, in every mode that makes or replays rollouts."""

from __future__ import annotations

import pytest

from slime.ray.manager.rollout_metrics import asked_for_metrics
from slime.utils.types import Sample
from tests.support.arguments import run_args


def args(**changes):
    base = {"log_passrate": True, "log_multi_turn": True, "rollout_max_response_len": 8}
    return run_args(**{**base, **changes})


def sample(group, reward, length=1, mask=None, **metadata):
    return Sample(group_index=group, reward=reward, response_length=length, loss_mask=mask, metadata=metadata)


def test_pass_rates_by_counting():
    """Groups of four with 1 and 4 successes: pass@1 = mean(1/4, 1), pass@2 = mean(1 - C(3,2)/C(4,2), 1)."""
    rewards = {0: [1, 0, 0.5, 0], 1: [1, 1.0, 1, 1]}
    samples = [sample(group, rewards[group][i]) for i in range(4) for group in (0, 1)]  # groups in any order
    found = asked_for_metrics(args(log_multi_turn=False), samples)
    assert found == pytest.approx({"passrate/pass@1": 0.625, "passrate/pass@2": 0.75, "passrate/pass@4": 1.0})


def test_the_raw_reward_of_the_metadata_counts():
    found = asked_for_metrics(args(log_multi_turn=False), [sample(0, 0.3, raw_reward=1), sample(0, 1)])
    assert found["passrate/pass@1"] == 1.0


def test_turns():
    samples = [
        sample(0, 0, length=8, mask=[1, 1, 0, 0, 0, 0, 1, 1], round_number=3),
        sample(0, 0, length=4, mask=[1, 1, 1, 1], round_number=1),
    ]
    found = asked_for_metrics(args(log_passrate=False), samples)
    assert found == {
        "multi_turn/raw_response_length/response_length_mean": 6,
        "multi_turn/raw_response_length/response_length_max": 8,
        "multi_turn/raw_response_length/response_length_min": 4,
        "multi_turn/raw_response_length/response_length_clip_ratio": 0.5,
        "multi_turn/wo_obs_response_length/response_length_mean": 4,
        "multi_turn/wo_obs_response_length/response_length_max": 4,
        "multi_turn/wo_obs_response_length/response_length_min": 4,
        "multi_turn/multi_turn_metric/round_number_mean": 2,
        "multi_turn/multi_turn_metric/round_number_max": 3,
        "multi_turn/multi_turn_metric/round_number_min": 1,
    }


def test_samples_without_metadata_or_rounds_are_no_hindrance():
    samples = [sample(0, 1, length=2, round_number=2), sample(0, 0, length=4)]
    samples[1].metadata = None
    found = asked_for_metrics(args(), samples)
    assert found["multi_turn/multi_turn_metric/round_number_mean"] == 2
    assert found["passrate/pass@1"] == 0.5
    samples[0].metadata = {"raw_reward": None}  # overrides nothing, as in training data
    assert asked_for_metrics(args(), samples)["passrate/pass@1"] == 0.5


def test_nothing_is_made_unless_asked_for():
    assert asked_for_metrics(args(log_passrate=False, log_multi_turn=False), [sample(0, 1)]) == {}
