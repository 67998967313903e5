"""Advantages as the trainer stores them: local to the CP rank, whatever the estimator looks at."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.train.loss import compute_advantages_and_returns
from tests.support.arguments import run_args
from tests.unit.algorithms import brute_force

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


def test_reinforce_plus_plus_skips_the_samples_that_train_nothing() -> None:
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
    """Sample 0 has two trained tokens, sample 1 two."""
    values = [torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([1.0, -1.0])]
    data = make_data(values=values)
    compute_advantages_and_returns(make_args(advantage_estimator="ppo"), data)
    for i, value in enumerate(values):
        advantage, expected = 0.0, [0.0] * (len(value) - 2)
        for t in (1, 0):
            following = float(value[1]) if t == 0 else 0.0
            reward = REWARDS[i] if t == 1 else 0.0
            advantage = reward + 0.5 * following - float(value[t]) + 0.5 * 0.9 * advantage
            expected.insert(0, advantage)
        torch.testing.assert_close(data["advantages"][i], torch.tensor(expected))
        torch.testing.assert_close(data["returns"][i][:2], torch.tensor(expected[:2]) + value[:2])


def one_response(mask: list[int], **columns: list[float]) -> dict[str, Any]:
    n = len(mask)
    return {
        "total_lengths": [n + 2], "response_lengths": [n], "rewards": [1.0], "loss_masks": [torch.tensor(mask)],
        **{name: [torch.tensor(values)] for name, values in columns.items()},
    }  # fmt: skip


def trained(data: dict[str, Any], name: str) -> list[float]:
    return [round(x, 6) for x in data[name][0][data["loss_masks"][0] != 0].tolist()]


TOOL = [1, 0, 0, 0, 1]
FIVE = [-1.0] * 5


@pytest.mark.parametrize("tool", [0.5, 3.0, -7.0])
@pytest.mark.parametrize("kl", [0.0, 2.0, float("inf"), float("nan")])
def test_ppo_neither_pays_for_tool_text_nor_steps_through_it(tool: float, kl: float) -> None:
    """GAE over two actions: deltas 0.5 - 0.5 = 0 and 1 - 0.5, so 0.9 * 0.5 and 0.5."""
    reference = [-1.0, -1.0 - kl, -1.0 - kl, -1.0 - kl, -1.0]
    data = one_response(TOOL, log_probs=FIVE, ref_log_probs=reference, values=[0.5, tool, tool, tool, 0.5])
    args = make_args(advantage_estimator="ppo", kl_coef=0.1, gamma=1.0, lambd=0.9)
    compute_advantages_and_returns(args, data)
    assert trained(data, "advantages") == [0.45, 0.5]
    assert trained(data, "returns") == [0.95, 1.0]
    assert trained(data, "kl") == [0.0, 0.0]
    assert bool(data["kl"][0].isfinite().all())


def test_a_tool_between_and_after_the_turns() -> None:
    """Values 0.2 to 0.4 at the four actions; the reward is on the last of them, before the last tool text."""
    mask = [1, 1, 0, 0, 1, 1, 0]
    data = one_response(mask, values=[0.2, 0.264, 5.0, -7.0, 0.33, 0.4, 9.0])
    compute_advantages_and_returns(make_args(advantage_estimator="ppo", gamma=1.0, lambd=0.95), data)
    expected, advantage, following = [], 0.0, 0.0
    for reward, value in ((1.0, 0.4), (0.0, 0.33), (0.0, 0.264), (0.0, 0.2)):
        advantage, following = reward + following - value + 0.95 * advantage, value
        expected.insert(0, round(advantage, 6))
    assert trained(data, "advantages") == pytest.approx(expected, abs=2e-6)
    assert data["advantages"][0][[2, 3, 6]].tolist() == [0.0] * 3


def test_reinforce_plus_plus_discounts_by_actions() -> None:
    data = one_response([1, 0, 1])
    compute_advantages_and_returns(make_args(advantage_estimator="reinforce_plus_plus", gamma=0.5), data)
    assert data["returns"][0].tolist() == [0.5, 0.0, 1.0]


def test_a_response_without_a_trained_token_has_no_advantage() -> None:
    """It may be all of a rank's samples."""
    for estimator in ("ppo", "reinforce_plus_plus"):
        data = one_response([0, 0, 0], values=[1.0, 2.0, 3.0])
        compute_advantages_and_returns(make_args(advantage_estimator=estimator), data)
        assert data["advantages"][0].tolist() == data["returns"][0].tolist() == [0.0] * 3


def random_columns(seed: int) -> tuple[dict[str, Any], list[list[int]]]:
    """Responses of up to 30 tokens: turns and tool text of random lengths, some without a trained token."""
    rng = random.Random(seed)
    masks = []
    for _ in range(rng.randint(1, 5)):
        mask: list[int] = []
        while len(mask) < rng.randint(1, 30):
            mask += [rng.randint(0, 1)] * rng.randint(1, 6)
        masks.append(mask)
    lengths = [len(mask) for mask in masks]
    columns = {
        name: [torch.tensor([rng.gauss(0, 1) for _ in mask], dtype=torch.float64) for mask in masks]
        for name in ("values", "log_probs", "ref_log_probs")
    }
    for mask, values, reference in zip(masks, columns["values"], columns["ref_log_probs"], strict=True):
        for t in (t for t, on in enumerate(mask) if not on):
            values[t], reference[t] = rng.choice([1e6, -7.0, math.inf]), rng.choice([-math.inf, math.nan, 3.0])
    return {
        "total_lengths": [n + 3 for n in lengths], "response_lengths": lengths,
        "rewards": [rng.gauss(0, 1) for _ in masks], "loss_masks": [torch.tensor(mask) for mask in masks], **columns,
    }, masks  # fmt: skip


def compare_with_loops(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(-seed)
        coef, gamma, lambd = rng.random(), rng.random(), rng.random()
        for estimator in ("ppo", "reinforce_plus_plus"):
            data, masks = random_columns(seed)
            values = [column.tolist() for column in data["values"]]
            pairs = zip(data["log_probs"], data["ref_log_probs"], strict=True)
            kls = [(policy - reference).tolist() for policy, reference in pairs]
            flags = {"advantage_estimator": estimator, "kl_coef": coef, "gamma": gamma, "lambd": lambd}
            compute_advantages_and_returns(make_args(**flags), data)
            for i, mask in enumerate(masks):
                if estimator == "ppo":
                    row = (data["rewards"][i], kls[i], values[i], mask)
                    expected = brute_force.ppo_advantages(*row, coef, gamma, lambd)
                else:
                    found = brute_force.reinforce_plus_plus(data["rewards"][i], kls[i], mask, coef, gamma)
                    expected = found, found
                for name, numbers in zip(("advantages", "returns"), expected, strict=True):
                    wanted = torch.tensor(numbers, dtype=torch.float64)
                    torch.testing.assert_close(data[name][i], wanted, rtol=0, atol=1e-10)


def test_random_tool_masks_against_loops_over_trained_tokens() -> None:
    compare_with_loops(range(40))


@pytest.mark.soak
def test_two_thousand_random_tool_masks() -> None:
    compare_with_loops(range(1000, 3000))


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


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "ppo"])
def test_an_infinite_kl_where_nothing_is_trained_stays_there(estimator: str) -> None:
    """The last token of sample 0 is masked; at -200 against -1 the estimate k3 is infinite in float32."""
    data = with_kl()
    data["values"] = [torch.zeros(n) for n in RESPONSES]
    data["log_probs"][0][3], data["ref_log_probs"][0][3] = -200.0, -1.0
    data.update(group_indices=[7, 7], **OWN)
    flags = {"advantage_estimator": estimator, "kl_coef": 0.5, "kl_loss_type": "k3", "normalize_advantages": True}
    compute_advantages_and_returns(make_args(**flags), data)
    assert not bool(data["loss_masks"][0][3])
    assert all(bool(values.isfinite().all()) for values in data["advantages"])


@pytest.mark.parametrize("placeholder", [0.0, -math.inf, math.nan])
def test_distillation_leaves_tool_text_out(placeholder: float) -> None:
    """The student did not write it: what the teacher thinks of it counts nowhere."""
    student, teacher = [-1.0, placeholder, -2.0], [-1.5, -9.0, -2.0]
    args = make_args(use_opd=True, opd_type="sglang", opd_kl_coef=1.0, normalize_advantages=True)
    data = one_response([1, 0, 1], log_probs=student, teacher_log_probs=teacher)
    compute_advantages_and_returns(args, data)
    assert trained(data, "opd_reverse_kl") == [0.5, 0.0]
    assert bool(data["opd_reverse_kl"][0].isfinite().all())
    whitened = torch.tensor([0.5, 1.0]) - 0.75
    torch.testing.assert_close(data["advantages"][0][[0, 2]], whitened / whitened.std())


def infinite_where_masked(args: Any, rollout_data: dict[str, Any]) -> None:
    """A custom advantage function that divides by what is 0 at masked tokens."""
    for name in ("advantages", "returns"):
        rollout_data[name] = [mask / mask + torch.arange(len(mask)) for mask in rollout_data["loss_masks"]]


def test_whitening_does_not_read_masked_advantages() -> None:
    path = f"{__name__}.infinite_where_masked"
    args = make_args(custom_advantage_function_path=path, normalize_advantages=True)
    data = one_response([1, 0, 1])
    compute_advantages_and_returns(args, data)
    assert trained(data, "advantages") == [round(x, 6) for x in (-math.sqrt(0.5), math.sqrt(0.5))]
