"""Means over the columns of a rollout, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.state.parallel import Ranks
from slime.backends.megatron_utils.train import cp_utils
from slime.backends.megatron_utils.train import train_metrics as reporting
from slime.backends.megatron_utils.train.data import sample_index
from slime.backends.megatron_utils.train.train_metrics import rollout_means
from tests.support.arguments import run_args


def data(**columns: Any) -> dict[str, Any]:
    """Two samples of one step: 3 response tokens, the last one masked, and 2."""
    return {
        "tokens": [torch.arange(5), torch.arange(6)],
        "total_lengths": [5, 6],
        "response_lengths": [3, 2],
        "loss_masks": [torch.tensor([1, 1, 0]), torch.tensor([1, 1])],
        "rollout_mask_sums": torch.tensor([2.0, 2.0]),
        "global_batch_sizes": [2],
        **columns,
    }


def means(**columns: Any) -> dict[str, float]:
    found = rollout_means(run_args(), data(**columns))
    assert (found.pop("response_lengths"), found.pop("total_lengths")) == (2.5, 5.5)
    return found


def test_tokens_weigh_as_in_the_loss_and_scalars_alike() -> None:
    found = means(log_probs=[torch.tensor([-1.0, -3.0, -9.0]), torch.tensor([-1.0, -2.0])], local_raw_reward=[1, 0])
    assert found == {"log_probs": pytest.approx(-1.75), "raw_reward": 0.5}


def test_a_trajectory_without_a_trained_token_is_not_counted() -> None:
    """Values at its masked tokens do not matter; its reward counts nevertheless."""
    found = means(
        log_probs=[torch.tensor([-1.0, -3.0, -9.0]), torch.tensor([float("nan"), float("-inf")])],
        loss_masks=[torch.tensor([1, 1, 0]), torch.tensor([0, 0])],
        rollout_mask_sums=torch.tensor([2.0, 0.0]),
        local_raw_reward=[1, 0],
    )
    assert found == {"log_probs": -2.0, "raw_reward": 0.5}


def test_rewards_are_those_of_trajectories_on_whatever_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trajectory 4 has three samples on two ranks, 5 and 6 one each: (mean of 1, 1 and 0.5) and 0 and 1."""
    parts: list[Any] = []
    monkeypatch.setattr(reporting, "all_gather_objects", lambda part: parts.append(part) or parts)
    means(rollout_ids=[4, 5], rewards=[1.0, 0.0])
    third = {"tokens": [torch.arange(5)] * 3, "total_lengths": [5] * 3, "response_lengths": [3] * 3}
    more = {"loss_masks": [torch.ones(3)] * 3, "rollout_mask_sums": torch.full((3,), 3.0)}
    found = rollout_means(run_args(), data(**third, **more, rollout_ids=[4, 4, 6], rewards=[1.0, 0.5, 1.0]))
    assert found["rewards"] == pytest.approx((2.5 / 3 + 0 + 1) / 3)


@pytest.mark.parametrize(
    ("column", "mean"),
    [
        ([torch.tensor([0.5]), torch.tensor([0.1, 0.3])], 0.3),  # one value per turn, say
        ([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])], 3.0),  # as many in all as there are tokens
        ((torch.tensor(1.0), 2), 1.5),
        ([torch.zeros(0), torch.zeros(0)], 0.0),
    ],
)
def test_columns_of_the_users_own_have_a_plain_mean(column: Any, mean: float) -> None:
    assert means(mine=column) == {"mine": pytest.approx(mean)}


@pytest.mark.parametrize("column", [[1.0, None], [None, 1.0], ["a", "b"], [torch.zeros(2, 2)] * 2, [[1.0], [2.0]]])
def test_what_has_no_mean_is_left_out(column: Any) -> None:
    assert means(mine=column) == {}


def test_samples_may_have_no_index() -> None:
    assert sample_index(data(), 0) is None
    assert [sample_index(data(sample_indices=[None, 7]), i) for i in (0, 1)] == [None, 7]


def test_context_parallel_ranks_together_have_the_same_means(monkeypatch: pytest.MonkeyPatch) -> None:
    column, turns = [torch.tensor([-1.0, -3.0, -9.0]), torch.tensor([-1.0, -2.0])], [torch.ones(1), torch.zeros(2)]
    whole = means(log_probs=column, turns=turns, local_raw_reward=[1, 0])
    parts: list[Any] = []
    for rank in range(4):
        ranks = Ranks(rank, 4)
        for module in (cp_utils, reporting):
            monkeypatch.setattr(module, "context_parallel", lambda ranks=ranks: ranks)
        lengths = zip(column, (5, 6), (3, 2), strict=True)
        local = [cp_utils.slice_log_prob_with_cp(*row) for row in lengths]
        monkeypatch.setattr(reporting, "all_gather_objects", lambda part: parts.append(part) or parts)
        found = rollout_means(run_args(), data(log_probs=local, turns=turns, local_raw_reward=[1, 0]))
    assert len(parts) == 4
    for name, mean in whole.items():
        assert found[name] == pytest.approx(mean), name


@pytest.mark.parametrize(("trains", "tflops"), [(False, (18 + 6) / 8), (True, (18 + 18) / 8)])
def test_a_frozen_tower_has_no_backward_pass(trains: bool, tflops: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 TFLOPs of the language model and 6 of the tower, of two data-parallel ranks with one device each."""
    times = {"perf/log_probs_time": 2.0, "perf/actor_train_time": 4.0}
    monkeypatch.setattr(reporting, "drain_metrics", lambda before: dict(times))
    monkeypatch.setattr(reporting, "is_last_stage", lambda: True)
    monkeypatch.setattr(reporting, "is_main_rank", lambda: False)
    monkeypatch.setattr(reporting, "all_gather_objects", lambda part: [part, ([3], 5e12)])
    monkeypatch.setattr(reporting.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(reporting, "forward_flops", lambda args, lengths, mtp: 1e12 * sum(lengths))
    found = reporting.log_perf(run_args(train_vision_tower=trains), 0, [1, 2], of_towers=1e12)
    assert found["perf/log_probs_tflops"] == pytest.approx((6 + 6) / 4)
    assert found["perf/actor_train_tflops"] == pytest.approx(tflops)
