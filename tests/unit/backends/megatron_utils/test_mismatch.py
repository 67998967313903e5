"""The meter on reports of one process: metrics, the warning, the stop."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.train.data import LossBatch
from slime.backends.megatron_utils.train.mismatch import MismatchError, MismatchMeter, note_mismatch
from tests.support.arguments import run_args

TRAIN = [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5]), torch.tensor([-3.0, -1.0, -1.0])]
ROLLOUT = [torch.tensor([-1.5, -9.0]), torch.tensor([-0.5]), torch.tensor([-2.0, -1.0, -3.0])]
MASKS = [torch.tensor([1, 0]), torch.tensor([1]), torch.tensor([1, 1, 1])]
MICRO_BATCHES = [[0, 2], [1]]
DATA = {"rollout_log_probs": ROLLOUT, "tokens": [None] * 3, "sample_indices": [7, 8, 9]}


def batch(indices: list[int], **changes: Any) -> dict[str, Any]:
    lengths = [len(TRAIN[i]) for i in indices]
    columns = {"log_probs": TRAIN, "rollout_log_probs": ROLLOUT, "loss_masks": MASKS}
    picked = {name: [column[i] for i in indices] for name, column in columns.items()}
    return {**picked, "total_lengths": [n + 1 for n in lengths], "response_lengths": lengths, **changes}


def measure(steps: int = 1, **flags: Any) -> list[dict[str, float]]:
    args = run_args(**{"mismatch_alarm_threshold": 0.1, "mismatch_stop_threshold": None, **flags})
    meter = MismatchMeter(args, 4, DATA, torch.device("cpu"))
    reports = [{"mismatch": note_mismatch(batch(indices))} for indices in MICRO_BATCHES]
    return [meter.measure(step, MICRO_BATCHES, reports) for step in range(steps)]


def test_metrics_are_means_over_trained_tokens() -> None:
    (metrics,) = measure()
    d = [0.5, 0.0, -1.0, 0.0, 2.0]
    assert metrics["mismatch/mean"] == pytest.approx(sum(map(abs, d)) / 5)
    assert metrics["mismatch/max"] == pytest.approx(2.0)
    assert metrics["mismatch/kl_k1"] == pytest.approx(-sum(d) / 5)
    k3 = torch.tensor(d, dtype=torch.float64).exp() - 1 - torch.tensor(d, dtype=torch.float64)
    assert metrics["mismatch/kl_k3"] == pytest.approx(k3.mean().item())


def test_one_warning_per_rollout_names_the_worst_sample(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        measure(steps=3)
    (record,) = caplog.records
    for part in (
        "rollout 4, optimizer step 0: log-probs of trainer and engine",
        "by 0.7 on average",
        "--mismatch-alarm-threshold 0.1",
        "Worst is sample index 9: 1 on average over 3 trained tokens, at most 2",
    ):
        assert part in record.message


@pytest.mark.parametrize(("step", "known", "alarms"), [(0, False, True), (1, False, False), (1, True, True)])
def test_what_earlier_steps_have_learned_is_no_alarm(
    step: int, known: bool, alarms: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """``--use-rollout-logprobs``: no pass before the steps, so a step's log-probs are those of its own weights."""
    args = run_args(mismatch_alarm_threshold=0.1, mismatch_stop_threshold=None)
    data = {**DATA, "log_probs": TRAIN} if known else DATA
    meter = MismatchMeter(args, 4, data, torch.device("cpu"))
    metrics = meter.measure(step, MICRO_BATCHES, [{"mismatch": note_mismatch(batch(i))} for i in MICRO_BATCHES])
    assert metrics["mismatch/mean"] == pytest.approx(0.7)
    assert bool(caplog.records) is alarms


def test_the_warning_does_without_sample_indices(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DATA, "sample_indices", [None, None, None])
    with caplog.at_level(logging.WARNING):
        measure()
    assert "Worst is sample at local position 2: 1 on average" in caplog.text


@pytest.mark.parametrize("limit", [0.0, 0.8])
def test_quiet_below_the_threshold_and_with_zero(limit: float, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        measure(mismatch_alarm_threshold=limit)
    assert not caplog.records


def test_the_stop_says_that_nothing_was_changed() -> None:
    with pytest.raises(MismatchError, match=r"--mismatch-stop-threshold 0\.5\. Worst.* parameters were not changed"):
        measure(mismatch_stop_threshold=0.5)
    assert measure(mismatch_stop_threshold=0.8)[0]["mismatch/mean"] < 0.8


def test_log_probs_of_the_policy_loss_come_first_and_without_engine_there_is_nothing() -> None:
    own = LossBatch(batch([0]))
    own.trainer_log_probs = [ROLLOUT[0]]
    assert note_mismatch(own).tolist() == [[0, 0, 0, 1, 0]]
    assert note_mismatch(batch([0], rollout_log_probs=None)) is None
    assert note_mismatch(batch([0], log_probs=None)) is None
    meter = MismatchMeter(run_args(), 0, {"tokens": []}, torch.device("cpu"))
    assert meter.measure(0, [[0]], [{"mismatch": None}]) == {}
