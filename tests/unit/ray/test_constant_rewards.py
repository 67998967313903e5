"""A reward that is the same for every sample is reported once, after a few rollouts."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from slime.ray.manager.rollout_metrics import CONSTANT_ROLLOUTS, ConstantRewards
from slime.utils.types import Sample
from tests.support.arguments import run_args


def said_of(caplog: pytest.LogCaptureFixture, rollouts: list[list[Any]], **flags: Any) -> list[str]:
    """Return the warnings for rollouts whose samples have these rewards."""
    caplog.clear()
    watch = ConstantRewards(run_args(**{"rm_type": "math", "run_dir": "runs/1", **flags}))
    with caplog.at_level(logging.WARNING):
        for rollout_id, rewards in enumerate(rollouts):
            watch.check(rollout_id, [Sample(reward=reward) for reward in rewards])
    return caplog.messages


def test_it_is_reported_once_with_the_value(caplog: pytest.LogCaptureFixture) -> None:
    assert said_of(caplog, [[0.0] * 8] * (CONSTANT_ROLLOUTS - 1)) == []
    [said] = said_of(caplog, [[0, 1.0]] + [[0.5] * 8] * (CONSTANT_ROLLOUTS + 5))
    assert said.startswith(
        f"the reward of all {8 * CONSTANT_ROLLOUTS} samples of rollouts 1 to {CONSTANT_ROLLOUTS} is 0.5: "
    )
    assert "runs/1/samples" in said
    assert said.endswith("(--rm-type math)")
    [said] = said_of(
        caplog, [[{"score": 1, "n": i}] for i in range(CONSTANT_ROLLOUTS)], reward_key="score", custom_rm_path="a.b"
    )
    assert said.endswith("(--custom-rm-path a.b)")


@pytest.mark.parametrize(
    "rollouts",
    [
        [[0.0, 0.0], [0.0, 1.0]] * 9,
        [[0.0], [1.0]] * 9,  # constant within a rollout, but not from one to the next
        [[None]] * 9,
        [[{"a": 1}]] * 9,
        [[]] * 9,
    ],
)
def test_what_varies_or_is_no_number_is_not(rollouts: list[list[Any]], caplog: pytest.LogCaptureFixture) -> None:
    assert said_of(caplog, rollouts) == []


def test_samples_left_out_of_the_loss_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    """Failed rewards are 0, whatever the others are; they are reported in another way."""
    watch = ConstantRewards(run_args(run_dir="r"))
    for rollout_id in range(9):
        watch.check(rollout_id, [Sample(reward=0.0, remove_sample=True)])
    assert caplog.messages == []


@pytest.mark.parametrize(
    "flags",
    [{"loss_type": "sft_loss"}, {"use_opd": True}, {"custom_reward_post_process_path": "a.b"},
     {"custom_convert_samples_to_train_data_path": "a.b"}],
)  # fmt: skip
def test_what_learns_from_something_else_is_left_alone(flags: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert said_of(caplog, [[0.0] * 8] * 9, **flags) == []
