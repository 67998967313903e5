"""Columns that the passes make are the passes'."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils.passes import drop_precomputed_logprobs


def test_log_probs_that_came_with_the_samples_are_not_the_old_policy(caplog: pytest.LogCaptureFixture) -> None:
    columns = {"rollout_log_probs": [torch.zeros(2)], "teacher_log_probs": [torch.zeros(2)], "rewards": [1.0]}
    data = {**columns, "log_probs": [torch.zeros(2)], "ref_entropy": [torch.zeros(2)]}
    drop_precomputed_logprobs(data)
    assert data == columns
    assert "left out of the train data: log_probs, ref_entropy" in caplog.text
    caplog.clear()
    drop_precomputed_logprobs(data)
    assert not caplog.records
