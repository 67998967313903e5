"""Every formula against its loop, and every gradient against finite differences. The full counts are soak tests."""

from __future__ import annotations

import pytest
import torch

from slime.algorithms.advantages import get_advantages_and_returns_batch
from slime.algorithms.kl import KL_TYPES, compute_approx_kl
from slime.algorithms.log_probs import log_probs_and_entropy
from slime.algorithms.losses import (
    compute_cispo_loss,
    compute_gspo_kl,
    compute_opsm_mask,
    compute_policy_loss,
    compute_value_loss,
)
from slime.algorithms.mis import icepop_weights, truncated_importance_weights
from slime.algorithms.reducers import constant_length, rollout_mean, token_sum, turn_mean
from tests.unit.algorithms.proofs import LIMIT, PROOFS, largest_error


@pytest.mark.parametrize("name", PROOFS)
def test_formula(name: str) -> None:
    assert largest_error(PROOFS[name], cases=25) <= LIMIT


@pytest.mark.soak
@pytest.mark.parametrize("name", PROOFS)
def test_formula_in_full(name: str, record_property) -> None:
    error = largest_error(PROOFS[name], cases=2000, seed=1)
    record_property("largest error", error)
    print(f"{name}: {error:.1e} in 2000 cases")
    assert error <= LIMIT


MASKS = [torch.tensor([1, 0, 1]), torch.tensor([1, 1]), torch.zeros(0)]
SUMS = [4.0, 4.0, 0.0]


def column(seed: int, scale: float = 0.4, count: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(count, dtype=torch.float64, generator=generator)


OLD, REFERENCE, ADVANTAGES = column(1), column(2), column(3, 1.0)


def split(values: torch.Tensor) -> list[torch.Tensor]:
    return list(values.split([3, 2, 0]))


def ppo(x: torch.Tensor, c: float | None = None) -> torch.Tensor:
    return compute_policy_loss(OLD - x, ADVANTAGES, 0.2, 0.3, c)[0]


def gspo(x: torch.Tensor) -> torch.Tensor:
    kl = compute_gspo_kl(split(x), split(OLD), split(x), MASKS)
    return compute_policy_loss(kl, ADVANTAGES, 0.2, 0.3)[0]


def opsm(x: torch.Tensor) -> torch.Tensor:
    class Args:
        opsm_delta = 0.05

    keep, _ = compute_opsm_mask(Args, split(x.detach()), split(OLD), split(ADVANTAGES), MASKS)
    return ppo(x) * keep


def cispo(x: torch.Tensor) -> torch.Tensor:
    """The weight has no gradient: with it held fixed the loss is linear in the log-probs."""
    return compute_cispo_loss(OLD - REFERENCE, x, ADVANTAGES, 0.2, 0.3)[0]


def corrected(x: torch.Tensor, weigh) -> torch.Tensor:
    return ppo(x) * weigh(OLD, REFERENCE, 0.5, 2.0).weights


def entropy(x: torch.Tensor) -> torch.Tensor:
    logits = torch.outer(x, column(4, 1.0, 6)).sin()
    found = log_probs_and_entropy(
        logits, torch.tensor([0, 1, 2, 3, 4]), chunk_size=2, with_entropy=True, temperature=0.7, entropy_grad=True,
        vocab_size=5,
    )  # fmt: skip
    return found[0] + 0.3 * found[1]


DIFFERENTIABLE = {
    **{f"KL {kind}": lambda x, kind=kind: compute_approx_kl(x, REFERENCE, kind) for kind in KL_TYPES},
    **{
        f"KL {kind}, unbiased": lambda x, kind=kind: compute_approx_kl(x, REFERENCE, kind, (x - OLD).exp())
        for kind in KL_TYPES
    },
    "PPO-clip": ppo,
    "dual clip": lambda x: ppo(x, 1.5),
    "GSPO": gspo,
    "CISPO": cispo,
    "OPSM": opsm,
    "TIS": lambda x: corrected(x, truncated_importance_weights),
    "IcePop": lambda x: corrected(x, icepop_weights),
    "value loss": lambda x: compute_value_loss(x, OLD, REFERENCE, 0.2)[0],
    "log-probs and entropy": entropy,
}
REDUCERS = {
    "rollout mean": lambda: rollout_mean(MASKS, SUMS),
    "turn mean": lambda: turn_mean(MASKS, [int(mask.sum()) for mask in MASKS], range(1, len(MASKS) + 1)),
    "token sum": lambda: token_sum(MASKS),
    "constant length": lambda: constant_length(MASKS, 7),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradient(name: str) -> None:
    """Through every reducer, so that masks and divisors are in the gradient too."""
    x = column(5).requires_grad_()
    for reducer in REDUCERS.values():
        assert torch.autograd.gradcheck(lambda x, reduce=reducer(): reduce(DIFFERENTIABLE[name](x)), x)


@pytest.mark.parametrize("weigh", [truncated_importance_weights, icepop_weights])
def test_corrections_pass_no_gradient(weigh) -> None:
    x = column(6).requires_grad_()
    assert not weigh(x, OLD, 0.5, 2.0).weights.requires_grad


def test_not_finite_goes_in_and_comes_out() -> None:
    """Nothing hides a NaN or an infinity on its way to the checks of the step."""
    for bad in (float("nan"), float("inf")):
        x = OLD.clone()
        x[0] = bad
        losses = {
            "advantage": compute_policy_loss(OLD, x, 0.2, 0.2)[0],
            "kl": compute_approx_kl(x, OLD, "k3"),
            "cispo": compute_cispo_loss(OLD, x, ADVANTAGES, 0.2, 0.2)[0],
            "value": compute_value_loss(x, OLD, REFERENCE, 0.2)[0],
            "returns": get_advantages_and_returns_batch([6], [5], [x], [OLD], 1.0, 1.0)[0][0],
        }
        for name, loss in losses.items():
            assert not torch.isfinite(token_sum(MASKS)(loss)), name
    nan = torch.full((2, 4), float("nan"), dtype=torch.float64)
    log_probs, entropies = log_probs_and_entropy(nan, torch.tensor([0, 1]), with_entropy=True)
    assert log_probs.isnan().all()
    assert entropies.isnan().all()
