"""Norms that SGLang computes with Triton, in engines on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engine_plugin import engine_plugin


@pytest.fixture
def load() -> Iterator[Callable[[str], ModuleType]]:
    with engine_plugin() as load:
        yield lambda name: load(f"cpu.{name}")


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    return (x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()).float()


def test_minimax_norm_is_over_the_heads_of_all_ranks(load: Callable[[str], ModuleType]) -> None:
    norms, eps = load("minimax_m2"), 1e-2
    q, k = torch.randn(5, 12), torch.randn(5, 4)
    q_weight, k_weight = torch.randn(12), torch.randn(4)
    ranks = [(*(x[..., part::2] for x in (q, k)), *(w[part::2] for w in (q_weight, k_weight))) for part in (0, 1)]
    sums = torch.stack([norms.sums_of_squares(*rank[:2]) for rank in ranks]).sum(0)
    for part, rank in enumerate(ranks):
        found = norms.normalize(*rank, sums, 2, eps)
        for x, weight, y in zip((q, k), (q_weight, k_weight), found, strict=True):
            torch.testing.assert_close(y, (rms_norm(x, eps) * weight)[:, part::2])


@pytest.mark.parametrize(("activation", "slope"), [("silu", True), ("swish", True), ("sigmoid", False)])
def test_norm_of_delta_nets_and_its_gate(load: Callable[[str], ModuleType], activation: str, slope: bool) -> None:
    x, gate = torch.randn(5, 8), torch.randn(5, 8)
    norm = SimpleNamespace(weight=torch.randn(8), eps=1e-2, activation=activation)
    expected = rms_norm(x, 1e-2) * norm.weight / (1 + (-gate).exp()) * (gate if slope else 1)
    torch.testing.assert_close(load("delta_nets").norm_and_gate(never, norm, x, gate), expected)


@pytest.mark.parametrize("fields", [{"group_size": 4}, {"norm_before_gate": False}, {}])
def test_other_norms_are_left_to_sglang(load: Callable[[str], ModuleType], fields: dict[str, Any]) -> None:
    norm, x = SimpleNamespace(weight=torch.ones(8), eps=0.0, activation="silu", **fields), torch.ones(2, 8)
    gate = x if fields else None
    assert load("delta_nets").norm_and_gate(lambda *args: args, norm, x, gate) == (norm, x, gate)


def never(*args: object) -> None:
    raise AssertionError("SGLang's own was called")
