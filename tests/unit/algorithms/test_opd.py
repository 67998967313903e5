"""On-policy distillation against loops over tokens."""

from __future__ import annotations

import random

import pytest
import torch

from slime.algorithms.advantages import distill


def cases(count: int) -> None:
    generator = random.Random(0)
    for _ in range(count):
        coef = generator.uniform(-1, 3)
        lengths = [generator.randrange(0, 6) for _ in range(generator.randrange(1, 4))]
        columns = [[[generator.gauss(-2, 2) for _ in range(n)] for n in lengths] for _ in range(3)]
        advantages, student, teacher = columns
        tensors = [[torch.tensor(row, dtype=torch.float64) for row in column] for column in columns]
        distilled, reverse_kl = distill(*tensors, coef)
        for i, n in enumerate(lengths):
            for t in range(n):
                difference = student[i][t] - teacher[i][t]
                assert abs(reverse_kl[i][t].item() - difference) < 1e-10
                assert abs(distilled[i][t].item() - (advantages[i][t] - coef * difference)) < 1e-10


def test_equals_loops() -> None:
    cases(50)


@pytest.mark.soak
def test_equals_loops_in_a_thousand_cases() -> None:
    cases(1000)


def test_carries_no_gradient_and_keeps_the_dtype() -> None:
    student = torch.zeros(3, requires_grad=True)
    (distilled,), (kl,) = distill([torch.ones(3)], [student], [torch.full((3,), -1.0, dtype=torch.float64)], 0.5)
    assert not distilled.requires_grad
    assert not kl.requires_grad
    assert distilled.dtype == kl.dtype == torch.float32
    assert distilled.tolist() == [0.5] * 3


def test_the_mean_is_the_reverse_kl() -> None:
    """Summed over the vocabulary with the student's probabilities: KL(student, teacher), never negative."""
    logits = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    student, teacher = torch.log_softmax(logits, dim=-1)
    _, (kl,) = distill([torch.zeros(7)], [student], [teacher], 1.0)
    expected = torch.nn.functional.kl_div(teacher, student, log_target=True, reduction="sum")
    assert (student.exp() * kl).sum().item() == pytest.approx(expected.item(), abs=1e-12)
    assert expected > 0


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match=r"sample 1: \(2,\) advantages, \(2,\) log-probs of the student and \(3,\)"):
        distill([torch.zeros(1), torch.zeros(2)], [torch.zeros(1), torch.zeros(2)], [torch.zeros(1), torch.zeros(3)], 1)
