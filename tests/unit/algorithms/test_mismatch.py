"""The mismatch meter's sums against loops over single tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.algorithms.mismatch import combine, mismatch_sums, mismatch_sums_by_sample
from tests.unit.algorithms import brute_force

log_probs = st.floats(-8, 0, allow_subnormal=False)
samples = st.lists(st.lists(st.tuples(log_probs, log_probs, st.integers(0, 1)), max_size=8), min_size=1, max_size=5)


def columns(rows: list) -> list[torch.Tensor]:
    return [torch.tensor([row[field] for row in rows], dtype=torch.float64) for field in range(3)]


@settings(max_examples=60, deadline=None)
@given(samples)
def test_sums_over_trained_tokens(rows: list) -> None:
    joined = columns([token for sample in rows for token in sample])
    sums = mismatch_sums_by_sample(*joined, [len(sample) for sample in rows])
    torch.testing.assert_close(sums, torch.stack([mismatch_sums(*columns(sample)) for sample in rows]))
    expected = [brute_force.mismatch(sample) for sample in rows]
    torch.testing.assert_close(sums, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-10)
    whole = combine(sums).tolist()
    assert whole == pytest.approx(brute_force.mismatch([token for sample in rows for token in sample]), abs=1e-10)


def test_masked_tokens_count_for_nothing_and_extremes_stay_finite() -> None:
    train, rollout = torch.tensor([-1.0, math.nan, -0.5]), torch.tensor([-200.0, 0.0, -0.5])
    sums = mismatch_sums(train, rollout, torch.tensor([1, 0, 1]))
    assert sums.tolist() == pytest.approx([199, -199, math.exp(20) - 1 - 20, 2, 199])
    assert mismatch_sums(train[:0], rollout[:0], torch.tensor([])).tolist() == [0] * 5
    assert mismatch_sums(train, rollout, torch.ones(3))[:3].isnan().all()


def test_nan_stays_in_its_sample() -> None:
    train = torch.tensor([-1.0, math.nan, -0.5, -0.25])
    sums = mismatch_sums_by_sample(train, torch.zeros(4), torch.ones(4), [1, 0, 2, 1])
    assert sums[:, 0].isnan().tolist() == [False, False, True, False]
    assert sums[:, 3].tolist() == [1, 0, 2, 1]
    assert sums[3].tolist() == pytest.approx([0.25, 0.25, math.exp(-0.25) - 1 + 0.25, 1, 0.25])
