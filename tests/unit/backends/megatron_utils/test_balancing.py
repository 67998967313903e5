from __future__ import annotations

import math
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.balancing import AUX, SEQ_AUX, Z, coefficients, router_losses

GROUP = SimpleNamespace(size=lambda: 1)


def by_loops(logits: list[list[float]], sample: list[int], topk: int, function: str) -> dict[str, float]:
    """The three losses from their definitions, with python's floats."""
    rows = [(number, row) for number, row in zip(sample, logits, strict=True) if number >= 0]
    experts = len(logits[0])

    def balance(rows: list[list[float]]) -> float:
        chosen, mass = [0] * experts, [0.0] * experts
        for row in rows:
            raw = [math.exp(x) if function == "softmax" else 1 / (1 + math.exp(-x)) for x in row]
            scores = [x / sum(raw) for x in raw]
            for e in sorted(range(experts), key=lambda e: -scores[e])[:topk]:
                chosen[e] += 1
            mass = [a + b for a, b in zip(mass, scores, strict=True)]
        return experts * sum(c / topk / len(rows) * m / len(rows) for c, m in zip(chosen, mass, strict=True))

    z = [math.log(sum(math.exp(x) for x in row)) ** 2 for _, row in rows]
    by_sample = [[row for number, row in rows if number == n] for n in sorted({number for number, _ in rows})]
    return {
        AUX: balance([row for _, row in rows]),
        SEQ_AUX: sum(balance(rows) for rows in by_sample),
        Z: sum(z) / len(z),
    }


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("seed", range(50))
def test_losses_of_a_layer_against_loops(function: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = int(torch.randint(2, 9, (), generator=generator))
    topk = int(torch.randint(1, experts + 1, (), generator=generator))
    lengths = torch.randint(1, 9, (int(torch.randint(1, 5, (), generator=generator)),), generator=generator)
    sample = torch.cat([torch.full((int(n),), i) for i, n in enumerate(lengths)] + [torch.full((seed % 4,), -1)])
    sample = sample[torch.randperm(len(sample), generator=generator)]  # the order of rows is of no account
    logits = 3 * torch.randn(len(sample), experts, dtype=torch.float64, generator=generator)
    router = SimpleNamespace(topk=topk, score_function=function, tp_cp_group=GROUP)
    losses = router_losses([AUX, SEQ_AUX, Z], logits, sample, lengths.double(), router)
    expected = by_loops(logits.tolist(), sample.tolist(), topk, function)
    assert {kind: loss.item() for kind, loss in losses.items()} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_gradients_of_the_losses(function: str) -> None:
    logits = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    sample, lengths = torch.tensor([0, 0, 1, 1, 1, -1, -1]), torch.tensor([2.0, 3.0], dtype=torch.float64)
    router = SimpleNamespace(topk=2, score_function=function, tp_cp_group=GROUP)

    def total(logits: torch.Tensor) -> torch.Tensor:
        return sum(router_losses([AUX, SEQ_AUX, Z], logits, sample, lengths, router).values())  # type: ignore[return-value]

    assert torch.autograd.gradcheck(total, logits)
    (gradient,) = torch.autograd.grad(total(logits), logits)
    assert torch.equal(gradient[5:], torch.zeros(2, 5, dtype=torch.float64))  # padding
    assert bool((gradient[:5].abs().sum(dim=1) > 0).all())


def test_even_load_is_the_least_that_the_loss_can_be() -> None:
    """Each expert gets as many tokens and as much score: 1, whatever the number of experts (one of them: E)."""
    router = SimpleNamespace(topk=1, score_function="softmax", tp_cp_group=GROUP)
    lengths = torch.tensor([4.0])
    even = router_losses([AUX], 50 * torch.eye(4), torch.zeros(4, dtype=torch.long), lengths, router)
    same = router_losses([AUX], 50 * torch.eye(4)[[0] * 4], torch.zeros(4, dtype=torch.long), lengths, router)
    assert even[AUX].item() == pytest.approx(1)
    assert same[AUX].item() == pytest.approx(4)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}, {}),
        ({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}, {SEQ_AUX: 0.1}),
        ({"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.01}, {Z: 0.01}),
        (
            {"moe_router_load_balancing_type": ["none", "aux_loss"], "moe_aux_loss_coeff": [0.0, 0.2]},
            {AUX: 0.2},
        ),
    ],
)
def test_coefficients(flags: dict[str, Any], expected: dict[str, float]) -> None:
    assert coefficients(Namespace(**flags)) == expected
