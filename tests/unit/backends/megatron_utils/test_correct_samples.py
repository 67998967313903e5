"""Metrics of the samples with full reward, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.state.parallel import Ranks
from slime.backends.megatron_utils.train import train_metrics as reporting
from slime.backends.megatron_utils.train.cp_utils import ResponseLayout
from slime.backends.megatron_utils.train.train_metrics import correct_sample_means
from tests.support.arguments import run_args

ARGS = run_args(log_correct_samples=True, rollout_max_response_len=8)


def data(**changes: Any) -> dict[str, Any]:
    lengths = [2, 8, 3, 1]
    return {
        "local_raw_reward": [1, 1.0, 0, {"score": 1}],
        "response_lengths": lengths,
        "total_lengths": [n + 2 for n in lengths],
        "loss_masks": [torch.tensor([1, 0]), *[torch.ones(n) for n in lengths[1:]]],
        "log_probs": [torch.tensor([-2.0, -50.0]), *[torch.full((n,), -0.5) for n in lengths[1:]]],
        **changes,
    }


def test_of_one_rank_by_hand() -> None:
    assert correct_sample_means(ARGS, data(), lambda part: [part]) == {
        "correct_response_lengths": 5.0,
        "correct_entropy": (2.0 + 0.5) / 2,
        "correct_length/p25": 0.5,
        "correct_length/p50": 0.0,
        "correct_length/p75": 0.0,
        "correct_length/p100": 0.5,
    }


def test_a_sample_without_a_trained_token_has_no_entropy() -> None:
    changes = {"loss_masks": [torch.zeros(2), *data()["loss_masks"][1:]]}
    found = correct_sample_means(ARGS, data(**changes), lambda part: [part])
    assert (found["correct_entropy"], found["correct_response_lengths"]) == (0.5, 5.0)


def test_the_engine_s_log_probs_stand_in_and_the_flag_decides() -> None:
    found = correct_sample_means(ARGS, data(log_probs=None, rollout_log_probs=data()["log_probs"]), lambda p: [p])
    assert found["correct_entropy"] == 1.25
    assert "correct_entropy" not in correct_sample_means(ARGS, data(log_probs=None), lambda p: [p])
    assert correct_sample_means(ARGS, data(local_raw_reward=[0, 0, 0, 0]), lambda p: [p]) == {}
    assert correct_sample_means(run_args(), data(), lambda p: [p]) == {}


def test_context_parallel_ranks_share_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = correct_sample_means(ARGS, data(), lambda part: [part])
    parts: list[Any] = []
    for rank in (0, 1):
        monkeypatch.setattr(reporting, "context_parallel", lambda rank=rank: Ranks(rank, 2))
        monkeypatch.setattr(ResponseLayout, "local", lambda _, column, rank=rank: [v[rank::2] for v in column])
        mine = data(log_probs=[values[rank::2] for values in data()["log_probs"]])
        correct_sample_means(ARGS, mine, lambda part: parts.append(part) or [part])
    assert correct_sample_means(ARGS, mine, lambda _: parts) == pytest.approx(whole)
