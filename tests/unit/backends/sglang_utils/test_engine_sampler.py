"""Sampling by inversion draws from the given distribution, and refuses what is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils.environment import ENGINE_PLUGIN


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry = registry.HookType = SimpleNamespace()  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.syspath_prepend(str(ENGINE_PLUGIN))
    ours = ("slime_engine_plugin", "slime_engine_plugin.sampler")
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    from slime_engine_plugin import sampler

    def never(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("SGLang's own sampler was called")

    yield lambda probs, original=never, **kwargs: sampler.sample(original, probs, **kwargs)
    for name in ours:
        sys.modules.pop(name, None)


def chi_squared(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Of the entries that are expected at least 5 times, in standard deviations from the mean of the statistic."""
    expected = probs.double() * counts.sum()
    enough = expected >= 5
    statistic = ((counts[enough] - expected[enough]) ** 2 / expected[enough]).sum().item()
    freedom = int(enough.sum()) - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("vocabulary", [3, 512, 151_936])
def test_frequencies_are_the_probabilities(sample, vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    probs = torch.softmax(5 * torch.randn(vocabulary), dim=0)
    rounds = 10 if vocabulary > 1000 else 150
    draws = [sample(probs.expand(64, -1).contiguous(), sampling_seed=None, positions=None) for _ in range(rounds)]
    drawn = torch.cat(draws)
    assert drawn.dtype == torch.int32
    counts = torch.bincount(drawn.long(), minlength=vocabulary).double()
    assert abs(chi_squared(counts, probs)) < 5


def test_rows_are_drawn_from_their_own_distribution(sample) -> None:
    torch.manual_seed(0)
    probs = torch.eye(50)[torch.randperm(50)]
    for _ in range(20):
        assert torch.equal(sample(probs).long(), probs.argmax(dim=-1))


def test_what_has_no_probability_is_never_drawn(sample) -> None:
    torch.manual_seed(1)
    probs = torch.rand(64, 1000)
    probs[torch.rand_like(probs) < 0.9] = 0
    probs[:, -1] = 0
    probs /= probs.sum(dim=-1, keepdim=True)
    for _ in range(50):
        assert (probs.gather(1, sample(probs).long()[:, None]) > 0).all()


def test_a_number_that_is_rounded_up_to_one_still_draws_something_possible(sample, monkeypatch) -> None:
    monkeypatch.setattr(torch, "rand_like", torch.ones_like)
    probs = torch.tensor([[0.25, 0.75, 0.0]])
    assert sample(probs).tolist() == [1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_rows_that_are_no_distribution_are_an_error(sample, bad: float) -> None:
    with pytest.raises(RuntimeError, match="not finite, or all zero"):
        sample(torch.stack([torch.full((4,), 0.25), torch.full((4,), bad)]))


def test_seeded_requests_are_drawn_by_sglang(sample) -> None:
    seeds = torch.tensor([1])
    drawn = sample(torch.ones(1, 4) / 4, original=lambda probs, **kw: kw["sampling_seed"], sampling_seed=seeds)
    assert drawn is seeds
