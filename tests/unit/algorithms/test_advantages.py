"""Returns, GAE and whitening against loops over single tokens in Python floats."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.algorithms import whitening
from slime.algorithms.advantages import (
    chunked_discounted_returns,
    chunked_gae,
    get_advantages_and_returns_batch,
    get_grpo_returns,
    get_reinforce_plus_plus_baseline_advantages,
    get_reinforce_plus_plus_returns,
    token_rewards,
    vanilla_gae,
)
from slime.algorithms.whitening import masked_whiten
from tests.unit.algorithms import brute_force
from tests.unit.algorithms.thread_group import ThreadGroup, run_ranks

numbers = st.floats(-5, 5, allow_subnormal=False)
unit = st.floats(0, 1, allow_subnormal=False)


def tensor(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual: torch.Tensor, expected: list) -> None:
    torch.testing.assert_close(actual, tensor(expected), rtol=1e-12, atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=30), unit, unit, st.integers(1, 9))
def test_gae_is_the_double_sum(rows, gamma: float, lambd: float, chunk_size: int) -> None:
    rewards, values = (tensor([row]) for row in map(list, zip(*rows, strict=True)))
    expected = brute_force.gae(rewards[0].tolist(), values[0].tolist(), gamma, lambd)
    for actual in (vanilla_gae(rewards, values, gamma, lambd), chunked_gae(rewards, values, gamma, lambd, chunk_size)):
        close(actual[0][0], expected[0])
        close(actual[1][0], expected[1])


def test_chunked_gae_equals_the_recursion_on_long_sequences() -> None:
    generator = torch.Generator().manual_seed(1)
    rewards, values = (torch.randn(3, 1000, dtype=torch.float64, generator=generator) for _ in range(2))
    for gamma, lambd in ((1.0, 1.0), (0.99, 0.95), (0.9, 0.0)):
        for a, b in zip(
            vanilla_gae(rewards, values, gamma, lambd), chunked_gae(rewards, values, gamma, lambd), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 255, 256, 257, 5000])
@pytest.mark.parametrize("chunk_size", [1, 2, 16, 128])
def test_chunked_gae_is_exact_over_all_levels_of_carries(length: int, chunk_size: int) -> None:
    """5000 tokens in chunks of 2 are twelve levels; the factor of the last one is 0.9405 to the power of 4096."""
    generator = torch.Generator().manual_seed(length)
    rewards, values = (torch.randn(2, length, dtype=torch.float64, generator=generator) for _ in range(2))
    for gamma, lambd in ((1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 1.0)):
        held = rewards.clone(), values.clone()
        expected = vanilla_gae(rewards, values, gamma, lambd)
        actual = chunked_gae(rewards, values, gamma, lambd, chunk_size)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
        assert actual[0].is_contiguous()
        assert torch.equal(held[0], rewards)
        assert torch.equal(held[1], values)


@pytest.mark.parametrize(("gamma", "lambd"), [(0.99, 0.95), (1.0, 0.95), (0.9, 0.9), (1.0, 1.0)])
def test_chunked_gae_rounds_no_worse_than_the_recursion(gamma: float, lambd: float) -> None:
    generator = torch.Generator().manual_seed(7)
    rewards, values = (torch.randn(16, 4000, generator=generator) for _ in range(2))
    exact = vanilla_gae(rewards.double(), values.double(), gamma, lambd)[0]
    by_chunks, by_tokens = (way(rewards, values, gamma, lambd)[0] for way in (chunked_gae, vanilla_gae))
    assert by_chunks.dtype == torch.float32
    assert (by_chunks - exact).pow(2).mean() <= 1.05 * (by_tokens - exact).pow(2).mean()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.tuples(numbers, numbers), max_size=12), min_size=1, max_size=4), unit, unit, st.booleans())
def test_batch_of_different_lengths(samples, gamma: float, lambd: float, chunked: bool) -> None:
    rewards = [tensor([r for r, _ in sample]) for sample in samples]
    values = [tensor([v for _, v in sample]) for sample in samples]
    lengths = [len(sample) for sample in samples]
    advantages, returns = get_advantages_and_returns_batch(
        [length + 1 for length in lengths], lengths, values, rewards, gamma, lambd, chunked=chunked
    )
    for i in range(len(samples)):
        expected = brute_force.gae(rewards[i].tolist(), values[i].tolist(), gamma, lambd)
        close(advantages[i], expected[0])
        close(returns[i], expected[1])


def test_batch_refuses_slices() -> None:
    with pytest.raises(ValueError, match=r"sample 0: .* gather context-parallel slices first"):
        get_advantages_and_returns_batch([5], [4], [torch.zeros(2)], [torch.zeros(2)], 1.0, 1.0)
    assert get_advantages_and_returns_batch([], [], [], [], 1.0, 1.0) == ([], [])


@settings(max_examples=40, deadline=None)
@given(st.lists(numbers, max_size=30), unit, st.integers(1, 7))
def test_discounted_returns(rewards: list[float], gamma: float, chunk_size: int) -> None:
    close(chunked_discounted_returns(tensor(rewards), gamma, chunk_size), brute_force.discounted(rewards, gamma))


def test_terminal_reward_sits_on_the_last_token() -> None:
    close(token_rewards(2.0, tensor([1.0, 3.0, 5.0]), 0.1), [-0.1, -0.3, 1.5])
    assert token_rewards(2.0, tensor([]), 0.1).numel() == 0


def test_grpo_gives_every_token_the_reward() -> None:
    a, b = get_grpo_returns([0.5, -1.0], [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
    assert a.tolist() == [0.5] * 3
    assert b.tolist() == [-1.0] * 2
    assert b.dtype == torch.float64


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(numbers, st.integers(0, 1)), min_size=1, max_size=20), numbers, unit, unit)
def test_reinforce_plus_plus(rows, reward: float, kl_coef: float, gamma: float) -> None:
    kl, mask = [row[0] for row in rows], [row[1] for row in rows]
    if not any(mask):
        with pytest.raises(AssertionError, match="sample 0 is fully masked"):
            get_reinforce_plus_plus_returns(
                [reward], [tensor(kl)], [tensor(mask)], [len(kl)], [len(kl) + 1], kl_coef, gamma
            )
        return
    (returns,) = get_reinforce_plus_plus_returns(
        tensor([reward]), [tensor(kl)], [torch.tensor(mask)], [len(kl)], [len(kl) + 1], kl_coef, gamma
    )
    close(returns, brute_force.reinforce_plus_plus(reward, kl, mask, kl_coef, gamma))


def test_reinforce_plus_plus_by_hand_with_a_tool_between() -> None:
    """Half of the reward is left one action earlier, whatever a tool wrote in between."""
    for tool in ([0], [0] * 50):
        mask = [1, *tool, 1]
        kl = tensor([0.0, *(float("inf") for _ in tool), 0.0])
        (returns,) = get_reinforce_plus_plus_returns(
            [1.0], [kl], [torch.tensor(mask)], [len(mask)], [len(mask) + 1], 0.1, 0.5
        )
        assert returns.tolist() == [0.5, *(0.0 for _ in tool), 1.0]
    assert get_reinforce_plus_plus_returns([], [], [], [], [], 0.1, 0.5) == []


def test_reinforce_plus_plus_refuses_slices() -> None:
    with pytest.raises(ValueError, match="gather context-parallel slices first"):
        get_reinforce_plus_plus_returns([1.0], [torch.zeros(2)], [torch.ones(4)], [4], [6], 0.0, 1.0)


def test_reinforce_plus_plus_baseline() -> None:
    (advantages,) = get_reinforce_plus_plus_baseline_advantages([2.0], [tensor([1.0, -3.0])], [torch.ones(2)], 0.5)
    close(advantages, [1.5, 3.5])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(numbers, st.booleans()), min_size=2, max_size=30), st.booleans())
def test_whitening(rows, shift_mean: bool) -> None:
    kept = [value for value, keep in rows if keep]
    values, mask = tensor([value for value, _ in rows]), torch.tensor([int(keep) for _, keep in rows])
    if not kept:
        with pytest.raises(ValueError, match="every response token of the step is masked"):
            masked_whiten(values, mask)
        return
    mean = statistics.fmean(kept)
    variance = statistics.variance(kept) if len(kept) > 1 else 0.0
    expected = [(value - mean) / (variance + 1e-8) ** 0.5 + (0 if shift_mean else mean) for value in values.tolist()]
    torch.testing.assert_close(
        masked_whiten(values, mask, shift_mean=shift_mean), tensor(expected), rtol=1e-9, atol=1e-10
    )


def test_whitening_over_ranks_uses_everyones_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        whitening, "_sum_over", lambda value, group: torch.stack(group.exchange(value)).sum(0) if group else value
    )
    values = torch.randn(30, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) + 100
    mask = torch.arange(30) % 3 != 0
    cuts = [slice(0, 11), slice(11, 30)]

    def rank(group: ThreadGroup) -> torch.Tensor:
        return masked_whiten(values[cuts[group.rank()]], mask[cuts[group.rank()]], group=group)

    torch.testing.assert_close(torch.cat(run_ranks(2, rank)), masked_whiten(values, mask), rtol=0, atol=1e-10)


def test_whitening_of_float32_with_a_large_offset() -> None:
    values = torch.tensor([1e6, 1e6 + 1, 1e6 + 2], dtype=torch.float32)
    torch.testing.assert_close(masked_whiten(values, torch.ones(3)), torch.tensor([-1.0, 0.0, 1.0]))
