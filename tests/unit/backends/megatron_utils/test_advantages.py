"""Advantages as the trainer stores them: local to the CP rank, whatever the estimator looks at."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.loss import compute_advantages_and_returns
from tests.support.arguments import run_args

TOTALS, RESPONSES, REWARDS = [6, 5], [4, 2], [1.0, -2.0]
MASKS = [torch.tensor([1, 1, 0, 0]), torch.tensor([1, 1])]
OWN = {"rollout_ids": [0, 1]}


def make_args(**overrides: Any) -> SimpleNamespace:
    values = {"advantage_estimator": "grpo", "kl_coef": 0.0, "kl_loss_type": "k1", "gamma": 0.5, "lambd": 0.9}
    return run_args(**{**values, **overrides})


def make_data(**columns: Any) -> dict[str, Any]:
    return {
        "total_lengths": TOTALS, "response_lengths": RESPONSES, "rewards": REWARDS, "loss_masks": MASKS, **columns,
    }  # fmt: skip


def with_kl() -> dict[str, Any]:
    """The policy exceeds the reference by 0.1 at every token."""
    log_probs = [torch.linspace(-3, -1, r) for r in RESPONSES]
    return make_data(log_probs=log_probs, ref_log_probs=[values - 0.1 for values in log_probs])


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_group_estimators_spread_the_reward(estimator: str) -> None:
    data = make_data()
    compute_advantages_and_returns(make_args(advantage_estimator=estimator), data)
    for column in (data["advantages"], data["returns"]):
        assert [values.tolist() for values in column] == [[1.0] * 4, [-2.0] * 2]
    assert all((kl == 0).all() for kl in data["kl"])


def test_reinforce_plus_plus_baseline() -> None:
    data = with_kl()
    compute_advantages_and_returns(make_args(advantage_estimator="reinforce_plus_plus_baseline", kl_coef=0.5), data)
    torch.testing.assert_close(data["kl"][0], torch.full((4,), 0.1))
    torch.testing.assert_close(data["advantages"][0], torch.full((4,), 1.0 - 0.05))
    torch.testing.assert_close(data["advantages"][1], torch.full((2,), -2.0 - 0.05))


def test_rloo_takes_the_kl_of_the_others_off_too() -> None:
    """Sample 1 has summed KL 0.2 over its trained tokens, sample 0 (two of four are trained) 0.2 + 0.6."""
    data = with_kl()
    data["ref_log_probs"][0] = data["ref_log_probs"][0] - 0.3
    data.update(group_indices=[7, 7], **OWN)
    compute_advantages_and_returns(make_args(advantage_estimator="rloo", kl_coef=0.5), data)
    torch.testing.assert_close(data["advantages"][0], torch.full((4,), 1.0 - 0.5 * (0.8 - 0.2)))
    torch.testing.assert_close(data["returns"][1], torch.full((2,), -2.0 - 0.5 * (0.2 - 0.8)))


def test_rloo_needs_groups_for_the_kl_only() -> None:
    data = make_data()
    compute_advantages_and_returns(make_args(advantage_estimator="rloo"), data)
    assert data["advantages"][1].tolist() == [-2.0, -2.0]
    with pytest.raises(ValueError, match=r"rloo with --kl-coef .* needs the group_index of every sample"):
        compute_advantages_and_returns(make_args(advantage_estimator="rloo", kl_coef=0.1), with_kl() | OWN)


def test_reinforce_plus_plus_by_hand() -> None:
    """Sample 0: reward on token 1, the last unmasked; G = [-.05 + .5 * .95, .95, 0, 0]."""
    data = with_kl()
    compute_advantages_and_returns(make_args(advantage_estimator="reinforce_plus_plus", kl_coef=0.5), data)
    torch.testing.assert_close(data["returns"][0], torch.tensor([-0.05 + 0.5 * 0.95, 0.95, 0.0, 0.0]))
    torch.testing.assert_close(data["returns"][1], torch.tensor([-0.05 + 0.5 * -2.05, -2.05]))


def test_reinforce_plus_plus_goes_on_without_the_samples_that_train_nothing() -> None:
    """A failed reward masks its sample; the others have the returns that they have without it."""
    alone = with_kl()
    args = make_args(advantage_estimator="reinforce_plus_plus", kl_coef=0.5)
    compute_advantages_and_returns(args, alone)
    data = with_kl()
    data["loss_masks"] = [torch.zeros(4, dtype=torch.int64), MASKS[1]]
    compute_advantages_and_returns(args, data)
    assert data["returns"][0].tolist() == [0.0] * 4
    torch.testing.assert_close(data["returns"][1], alone["returns"][1])


def test_ppo_by_recursion() -> None:
    values = [torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([1.0, -1.0])]
    data = make_data(values=values)
    compute_advantages_and_returns(make_args(advantage_estimator="ppo"), data)
    for i, value in enumerate(values):
        advantage, expected = 0.0, []
        for t in reversed(range(len(value))):
            following = float(value[t + 1]) if t + 1 < len(value) else 0.0
            reward = REWARDS[i] if t == len(value) - 1 else 0.0
            advantage = reward + 0.5 * following - float(value[t]) + 0.5 * 0.9 * advantage
            expected.insert(0, advantage)
        torch.testing.assert_close(data["advantages"][i], torch.tensor(expected))
        torch.testing.assert_close(data["returns"][i], torch.tensor(expected) + value)


def test_whitening_uses_trained_tokens_and_leaves_returns() -> None:
    data = make_data()
    compute_advantages_and_returns(make_args(normalize_advantages=True), data)
    trained = [1.0, 1.0, -2.0, -2.0]  # two unmasked tokens each
    mean = sum(trained) / 4
    std = math.sqrt(sum((a - mean) ** 2 for a in trained) / 3)
    torch.testing.assert_close(data["advantages"][0], torch.full((4,), (1.0 - mean) / std))
    torch.testing.assert_close(data["advantages"][1], torch.full((2,), (-2.0 - mean) / std))
    assert data["returns"][0].tolist() == [1.0] * 4


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match=r"--kl-coef 0\.5 needs log_probs"):
        compute_advantages_and_returns(make_args(kl_coef=0.5), make_data())
    with pytest.raises(ValueError, match="critic's values"):
        compute_advantages_and_returns(make_args(advantage_estimator="ppo"), make_data())
    with pytest.raises(ValueError, match="magic"):
        compute_advantages_and_returns(make_args(advantage_estimator="magic"), make_data())


def forgetful(args: Any, rollout_data: dict[str, Any]) -> None:
    """A custom advantage function that sets only one of the two columns."""
    rollout_data["advantages"] = rollout_data["kl"]


def test_custom_function_must_set_both_columns() -> None:
    path = f"{__name__}.forgetful"
    with pytest.raises(ValueError, match=r"forgetful' .*did not set \['returns'\]"):
        compute_advantages_and_returns(make_args(custom_advantage_function_path=path), make_data())


def test_the_engines_log_probs_are_the_policy_when_they_are_the_old_policy() -> None:
    """No pass computes the trainer's log-probs then; the KL is taken from the engines."""
    reference = [torch.linspace(-3, -1, r) for r in RESPONSES]
    data = make_data(ref_log_probs=reference, rollout_log_probs=[values + 0.4 for values in reference])
    compute_advantages_and_returns(make_args(kl_coef=0.1, use_rollout_logprobs=True), data)
    torch.testing.assert_close(torch.cat(data["kl"]), torch.full((6,), 0.4))


def test_distillation_is_taken_off_before_whitening_and_leaves_returns() -> None:
    student = [torch.linspace(-3, -1, r) for r in RESPONSES]
    teacher = [values - 0.25 * (i + 1) for i, values in enumerate(student)]
    args = make_args(use_opd=True, opd_type="sglang", opd_kl_coef=2.0)
    data = make_data(log_probs=student, teacher_log_probs=teacher)
    compute_advantages_and_returns(args, data)
    for i, (n, reward) in enumerate(zip(RESPONSES, REWARDS, strict=True)):
        torch.testing.assert_close(data["opd_reverse_kl"][i], torch.full((n,), 0.25 * (i + 1)))
        torch.testing.assert_close(data["advantages"][i], torch.full((n,), reward - 0.5 * (i + 1)))
        torch.testing.assert_close(data["returns"][i], torch.full((n,), reward))
    whitened = make_data(log_probs=student, teacher_log_probs=teacher)
    compute_advantages_and_returns(make_args(**{**vars(args), "normalize_advantages": True}), whitened)
    trained = torch.cat([a[m.bool()] for a, m in zip(data["advantages"], MASKS, strict=True)])
    expected = (torch.cat(data["advantages"]) - trained.mean()) / (trained.var() + 1e-8).sqrt()
    torch.testing.assert_close(torch.cat(whitened["advantages"]), expected)


def test_the_engines_log_probs_are_the_student_when_they_are_the_old_policy() -> None:
    rollout = [torch.full((r,), -2.0) for r in RESPONSES]
    teacher = [torch.full((r,), -3.0) for r in RESPONSES]
    data = make_data(rollout_log_probs=rollout, teacher_log_probs=teacher)
    compute_advantages_and_returns(
        make_args(use_opd=True, opd_type="sglang", opd_kl_coef=1.0, use_rollout_logprobs=True), data
    )
    assert torch.cat(data["opd_reverse_kl"]).tolist() == [1.0] * sum(RESPONSES)


def test_distillation_says_what_is_missing() -> None:
    args = make_args(use_opd=True, opd_type="sglang", opd_kl_coef=1.0)
    with pytest.raises(ValueError, match=r"no teacher_log_probs\. slime\.rollout\.on_policy_distillation sets them"):
        compute_advantages_and_returns(args, make_data(log_probs=[torch.zeros(r) for r in RESPONSES]))
    with pytest.raises(ValueError, match="needs the student's log_probs"):
        compute_advantages_and_returns(args, make_data(teacher_log_probs=[torch.zeros(r) for r in RESPONSES]))


def test_rloo_penalises_a_trajectory_that_is_alone_too() -> None:
    """The rest of its group was trained a step before."""
    data = with_kl()
    data.update(group_indices=[7, 8], **OWN)
    compute_advantages_and_returns(make_args(advantage_estimator="rloo", kl_coef=0.5), data)
    torch.testing.assert_close(data["advantages"][0], torch.full((4,), 1.0 - 0.5 * 0.2))
    torch.testing.assert_close(data["advantages"][1], torch.full((2,), -2.0 - 0.5 * 0.2))


def test_advantages_and_returns_may_be_changed_apart() -> None:
    for estimator in ("grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo"):
        data = with_kl()
        compute_advantages_and_returns(make_args(advantage_estimator=estimator), data)
        before = [values.clone() for values in data["returns"]]
        for values in data["advantages"]:
            values.mul_(0.5)
        assert all(torch.equal(values, old) for values, old in zip(data["returns"], before, strict=True)), estimator


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo"])
def test_an_infinite_kl_where_nothing_is_trained_stays_there(estimator: str) -> None:
    """The last token of sample 0 is masked; at -200 against -1 the estimate k3 is infinite in float32."""
    data = with_kl()
    data["log_probs"][0][3], data["ref_log_probs"][0][3] = -200.0, -1.0
    data.update(group_indices=[7, 7], **OWN)
    flags = {"advantage_estimator": estimator, "kl_coef": 0.5, "kl_loss_type": "k3", "normalize_advantages": True}
    compute_advantages_and_returns(make_args(**flags), data)
    assert not bool(data["loss_masks"][0][3])
    assert all(bool(values.isfinite().all()) for values in data["advantages"])
