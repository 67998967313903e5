"""KL estimators against their formulas, and against the divergence they estimate."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.algorithms.kl import KL_TYPES, compute_approx_kl
from tests.unit.algorithms import brute_force

log_probs = st.lists(st.tuples(*[st.floats(-12, 0) for _ in range(3)]), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(log_probs, st.sampled_from(KL_TYPES), st.booleans())
def test_equals_the_formula(rows, kind: str, weighted: bool) -> None:
    p, base, old = torch.tensor(rows, dtype=torch.float64).unbind(1)
    ratio = torch.exp(p - old) if weighted else None
    actual = compute_approx_kl(p, base, kind, ratio)
    expected = [
        brute_force.kl(*row, kind, float(r))
        for row, r in zip(
            zip(p.tolist(), base.tolist(), strict=True), ratio if weighted else [1.0] * len(p), strict=True
        )
    ]
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_expectation_is_the_divergence(kind: str) -> None:
    p, base = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    estimate = (p * compute_approx_kl(p.log(), base.log(), kind)).sum()
    torch.testing.assert_close(estimate, (p * (p / base).log()).sum(), rtol=0, atol=1e-12)


def test_unbiased_estimate_from_another_policys_samples() -> None:
    old = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    p, base = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    estimate = (old * compute_approx_kl(p.log(), base.log(), "k3", p / old)).sum()
    torch.testing.assert_close(estimate, (p * (p / base).log()).sum(), rtol=0, atol=1e-12)


def test_equal_policies_give_exactly_zero_and_small_differences_keep_their_digits() -> None:
    p = torch.tensor([-0.5, -3.0])
    for kind in KL_TYPES:
        assert compute_approx_kl(p, p, kind).tolist() == [0.0, 0.0]
    d = 1e-4
    estimate = compute_approx_kl(torch.tensor([d]), torch.tensor([0.0]), "k3").item()
    assert estimate == pytest.approx(d * d / 2, rel=2e-2)  # exp(-d) - 1 + d in float32 would be off by a factor


def test_low_precision_is_widened_and_gradients_flow() -> None:
    p = torch.tensor([-1.0], dtype=torch.bfloat16, requires_grad=True)
    value = compute_approx_kl(p, torch.tensor([-2.0], dtype=torch.bfloat16), "k2")
    assert value.dtype == torch.float32
    value.sum().backward()
    assert p.grad.item() == 1.0
    x = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    base = torch.tensor([-1.3, -1.5], dtype=torch.float64)
    for kind in KL_TYPES:
        assert torch.autograd.gradcheck(lambda x, kind=kind: compute_approx_kl(x, base, kind, x.exp()), x)


def test_unknown_type_names_the_flag() -> None:
    with pytest.raises(ValueError, match="--kl-loss-type 'k4' is unknown; expected one of k1, k2, k3, low_var_kl"):
        compute_approx_kl(torch.zeros(1), torch.zeros(1), "k4")


def test_low_var_kl_has_a_gradient_where_exp_is_infinite() -> None:
    log_probs = torch.tensor([-200.0, -0.1, -2.0], requires_grad=True)
    kl = compute_approx_kl(log_probs, torch.tensor([-0.1, -200.0, -1.0]), "low_var_kl")
    kl.sum().backward()
    expected = [10.0, 10.0, math.e - 2]
    torch.testing.assert_close(kl.detach(), torch.tensor(expected))
    torch.testing.assert_close(log_probs.grad, torch.tensor([0.0, 0.0, 1 - math.e]))
