"""Policy and value losses, importance weights and reducers against loops in Python floats, and gradcheck."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.algorithms.losses import (
    compute_cispo_loss,
    compute_gspo_kl,
    compute_opsm_mask,
    compute_policy_loss,
    compute_value_loss,
    sequence_kl,
)
from slime.algorithms.mis import icepop_weights, truncated_importance_weights
from slime.algorithms.reducers import (
    constant_length,
    make_reducer,
    num_trained_tokens,
    rollout_mean,
    token_sum,
    turn_mean,
)
from tests.unit.algorithms import brute_force

numbers = st.floats(-3, 3, allow_subnormal=False)
pairs = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20)


def tensor(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual: torch.Tensor, expected) -> None:
    torch.testing.assert_close(actual, tensor(expected), rtol=1e-12, atol=1e-10)


@settings(max_examples=80, deadline=None)
@given(pairs, st.floats(0.05, 0.5), st.floats(0.05, 0.5), st.sampled_from([None, 1.5, 3.0]))
def test_ppo_clip(rows, low: float, high: float, c: float | None) -> None:
    kl, advantages = tensor(rows).unbind(1)
    loss, clip_fraction = compute_policy_loss(kl, advantages, low, high, c)
    expected = [brute_force.ppo(*row, low, high, c) for row in rows]
    close(loss, [value for value, _ in expected])
    close(clip_fraction, [clipped for _, clipped in expected])


def test_ppo_clip_by_hand() -> None:
    kl = -torch.log(tensor([1.5, 1.5, 0.5, 0.5, 10.0]))
    loss, clip_fraction = compute_policy_loss(kl, tensor([1.0, -1.0, 1.0, -1.0, -1.0]), 0.2, 0.28, 3.0)
    close(loss, [-1.28, 1.5, -0.5, 0.8, 3.0])
    assert clip_fraction.tolist() == [1, 0, 0, 1, 0]


def test_dual_clip_must_exceed_one() -> None:
    with pytest.raises(ValueError, match=r"--eps-clip-c must be greater than 1, got 1.0"):
        compute_policy_loss(torch.zeros(1), torch.ones(1), 0.2, 0.2, 1.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=20))
def test_cispo(rows) -> None:
    kl, log_probs, advantages = tensor(rows).unbind(1)
    log_probs = log_probs.clone().requires_grad_()
    # the ratio depends on log_probs too, as in training, and must not pass a gradient on
    loss, clip_fraction = compute_cispo_loss(kl + log_probs.detach() - log_probs, log_probs, advantages, 0.3, 0.4)
    weights = [brute_force.clip(math.exp(-k), 0.7, 1.4) for k, _, _ in rows]
    close(loss.detach(), [-w * a * p for w, (_, p, a) in zip(weights, rows, strict=True)])
    close(clip_fraction, [float(not 0.7 <= math.exp(-k) <= 1.4) for k, _, _ in rows])
    loss.sum().backward()
    close(log_probs.grad, [-w * a for w, (_, _, a) in zip(weights, rows, strict=True)])  # the weight has no gradient


responses = st.lists(
    st.lists(st.tuples(numbers, numbers, st.integers(0, 1), numbers), min_size=1, max_size=6), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(responses)
def test_gspo_and_opsm(samples) -> None:
    new, old, mask, advantage = (
        [tensor([token[field] for token in sample]) for sample in samples] for field in range(4)
    )
    means = [brute_force.masked_mean([t[1] - t[0] for t in sample], [t[2] for t in sample]) for sample in samples]
    local = [row[::2] for row in new]
    close(compute_gspo_kl(new, old, local, mask), [m for m, row in zip(means, local, strict=True) for _ in row])

    delta = 0.1
    keep, metric = compute_opsm_mask(SimpleNamespace(opsm_delta=delta), new, old, advantage, mask)
    dropped = [[token[3] < 0 and mean > delta for token in sample] for mean, sample in zip(means, samples, strict=True)]
    assert keep.tolist() == [float(not drop) for row in dropped for drop in row]
    shares = [
        sum(drop and t[2] for drop, t in zip(row, sample, strict=True)) / max(sum(t[2] for t in sample), 1)
        for row, sample in zip(dropped, samples, strict=True)
    ]
    assert metric.item() == pytest.approx(sum(shares))


def test_opsm_threshold_by_hand() -> None:
    # mean drift 0.15 over the two trained tokens; the masked third would lift it to 3.4
    old, new = [tensor([0.0, 0.0, 0.0])] * 2, [tensor([-0.1, -0.2, -10.0])] * 2
    advantages, masks = [tensor([-1.0, 1.0, -1.0]), tensor([-1.0, 1.0, -1.0])], [tensor([1, 1, 0])] * 2
    # of the two trained tokens one is dropped, in both samples
    for delta, expected, metric in ((0.16, [1, 1, 1] * 2, 0.0), (0.14, [0, 1, 0] * 2, 1.0)):
        keep, seen = compute_opsm_mask(SimpleNamespace(opsm_delta=delta), new, old, advantages, masks)
        assert keep.tolist() == expected
        assert seen.item() == metric


def test_opsm_counts_trained_tokens_alone() -> None:
    """All four tokens are dropped, one of them is trained; of a part of a response its share of the tokens is known."""
    args, full = SimpleNamespace(opsm_delta=0.1), ([tensor([-1.0] * 4)], [tensor([0.0] * 4)])
    for local, metric in ((4, 1.0), (1, 0.25)):
        _, seen = compute_opsm_mask(args, *full, [tensor([-1.0] * local)], [tensor([0, 0, 1, 0])])
        assert seen.item() == metric


def test_gspo_gradient_spreads_over_the_trained_tokens() -> None:
    new = tensor([-1.0, -2.0, -3.0]).requires_grad_()
    sequence_kl(new, tensor([-1.0, -1.0, -1.0]), tensor([1, 0, 1])).backward()
    close(new.grad, [-0.5, 0.0, -0.5])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=20), st.floats(0.1, 1.0))
def test_value_loss(rows, limit: float) -> None:
    values, old, returns = tensor(rows).unbind(1)
    loss, clip_fraction = compute_value_loss(values, old, returns, limit)
    close(loss, [max((brute_force.clip(v, o - limit, o + limit) - g) ** 2, (v - g) ** 2) for v, o, g in rows])
    close(clip_fraction, [float(abs(v - o) > limit) for v, o, _ in rows])


@settings(max_examples=60, deadline=None)
@given(pairs)
def test_importance_weights(rows) -> None:
    train, rollout = tensor(rows).unbind(1)
    ratios = [math.exp(a - b) for a, b in rows]
    vanilla = truncated_importance_weights(train.clone().requires_grad_(), rollout, 0.5, 2.0)
    close(vanilla.weights, [brute_force.clip(r, 0.5, 2.0) for r in ratios])
    close(vanilla.ratio, ratios)
    close(vanilla.clipped, [float(not 0.5 <= r <= 2.0) for r in ratios])
    close(vanilla.deviation, [abs(r - 1) for r in ratios])
    icepop = icepop_weights(train, rollout, 0.5, 2.0)
    close(icepop.weights, [r if 0.5 <= r <= 2.0 else 0.0 for r in ratios])
    close(icepop.clipped, vanilla.clipped.tolist())
    assert not vanilla.weights.requires_grad


samples_for_reduction = st.lists(
    st.lists(st.tuples(numbers, st.integers(0, 1)), max_size=6), min_size=1, max_size=6
).filter(any)


@settings(max_examples=60, deadline=None)
@given(samples_for_reduction, st.data())
def test_reducers(samples, data: st.DataObject) -> None:
    masks = [torch.tensor([m for _, m in sample], dtype=torch.int32) for sample in samples]
    values = tensor([value for sample in samples for value, _ in sample])
    sums = data.draw(st.lists(st.integers(0, 20), min_size=len(samples), max_size=len(samples)))
    own = [sum(value * mask for value, mask in sample) for sample in samples]
    by_rollout = sum(total / max(size, 1) for total, size in zip(own, sums, strict=True))
    turns = data.draw(st.lists(st.integers(1, 5), min_size=len(samples), max_size=len(samples)))
    by_turn = sum(
        brute_force.masked_mean([v for v, _ in s], [m for _, m in s]) / n for s, n in zip(samples, turns, strict=True)
    )
    by_sample = sum(brute_force.masked_mean([v for v, _ in s], [m for _, m in s]) for s in samples)
    for reducer, expected in (
        (rollout_mean(masks, sums), by_rollout),
        (rollout_mean(masks, torch.tensor(sums, dtype=torch.float64)), by_rollout),
        (make_reducer(masks, sums), by_rollout),
        (make_reducer(masks), by_sample),
        (make_reducer(masks, sums, calculate_per_token_loss=True), sum(own)),
        (token_sum(masks), sum(own)),
        (turn_mean(masks, [mask.sum() for mask in masks], turns), by_turn),
        (constant_length(masks, 7), sum(own) / 7),
    ):
        close(reducer(values), expected)
    assert num_trained_tokens(masks).item() == sum(m for sample in samples for _, m in sample)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_masked_may_be_anything(bad: float) -> None:
    values = tensor([1.0, bad, 3.0]).requires_grad_()
    for reduce in (token_sum([torch.tensor([1, 0, 1])]), rollout_mean([torch.tensor([1, 0, 1])], [1])):
        total = reduce(values)
        assert total.item() == 4.0
        assert torch.autograd.grad(total, values)[0].tolist() == [1.0, 0.0, 1.0]


def test_rollout_mean_does_not_depend_on_the_division() -> None:
    """Siblings of one rollout in different micro-batches, and a sample cut over ranks, add up to the same loss."""
    values, masks, sums = tensor([1.0, 2.0, 3.0, 4.0, 5.0]), [torch.ones(2), torch.ones(3)], [5.0, 5.0]
    whole = rollout_mean(masks, sums)(values)
    parts = rollout_mean([torch.ones(2), torch.ones(1)], sums)(values[:3]) + rollout_mean([torch.ones(2)], sums[:1])(
        values[3:]
    )
    assert whole.item() == pytest.approx(15 / 5)
    assert parts.item() == pytest.approx(whole.item())


def test_reducer_refuses_other_lengths() -> None:
    with pytest.raises(ValueError, match="--pg-loss-length must be positive, got 0"):
        constant_length([torch.ones(3)], 0)
    with pytest.raises(ValueError, match=r"one value per token \(3,\), got \(2,\)"):
        token_sum([torch.ones(3)])(torch.zeros(2))


def test_gradcheck_of_the_losses() -> None:
    generator = torch.Generator().manual_seed(0)

    def case(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    old, advantages, mask = case(8), case(8), torch.tensor([1, 1, 0, 1, 1, 1, 0, 1])
    reduce = rollout_mean([mask], [6])
    x = (old + 0.3 * case(8)).requires_grad_()
    for c in (None, 2.0):
        assert torch.autograd.gradcheck(
            lambda x, c=c: reduce(compute_policy_loss(old - x, advantages, 0.2, 0.3, c)[0]), x
        )
    assert torch.autograd.gradcheck(
        lambda x: reduce(compute_policy_loss(compute_gspo_kl([x], [old], [x], [mask]), advantages, 0.2, 0.3)[0]), x
    )
    assert torch.autograd.gradcheck(lambda x: reduce(compute_value_loss(x, old, advantages, 0.2)[0]), x)
