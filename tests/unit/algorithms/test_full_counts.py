"""Every formula against its loop on many random cases, with shapes and scales beyond those of the quick tests."""

from __future__ import annotations

import random

import pytest
import torch

from slime.algorithms import log_probs as log_probs_module
from slime.algorithms.advantages import get_reinforce_plus_plus_returns
from slime.algorithms.gae import chunked_gae, vanilla_gae
from slime.algorithms.kl import KL_TYPES, compute_approx_kl
from slime.algorithms.log_probs import log_probs_and_entropy
from slime.algorithms.policy_loss import compute_policy_loss
from slime.algorithms.rewards import normalize_by_group
from tests.unit.algorithms import brute_force
from tests.unit.algorithms.thread_group import ThreadGroup, run_ranks

pytestmark = pytest.mark.soak

CASES = 2000
LIMIT = {"rtol": 1e-12, "atol": 1e-10}


def tensor(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_formulas() -> None:
    rng = random.Random(0)
    for _ in range(CASES):
        length, scale = rng.randint(1, 60), 10 ** rng.uniform(-3, 0.5)
        a, b, c = ([rng.gauss(0, scale) for _ in range(length)] for _ in range(3))
        gamma, lambd, coef = rng.random(), rng.random(), rng.random()
        expected = brute_force.gae(a, b, gamma, lambd)
        for actual in (
            vanilla_gae(tensor([a]), tensor([b]), gamma, lambd),
            chunked_gae(tensor([a]), tensor([b]), gamma, lambd, rng.randint(1, 70)),
        ):
            torch.testing.assert_close(actual[0][0], tensor(expected[0]), **LIMIT)
            torch.testing.assert_close(actual[1][0], tensor(expected[1]), **LIMIT)

        mask = [rng.randint(0, 1) for _ in range(length - 1)] + [1]
        rewards = [-coef * k * m for k, m in zip(a, mask, strict=True)]
        rewards[-1] += scale
        (returns,) = get_reinforce_plus_plus_returns(
            [scale], [tensor(a)], [torch.tensor(mask)], [length], [length + 1], coef, gamma
        )
        torch.testing.assert_close(returns, tensor(brute_force.discounted(rewards, gamma)), **LIMIT)

        clip = (rng.random() / 2, rng.random() / 2, rng.choice([None, 1 + 3 * rng.random() + 1e-3]))
        loss, fraction = compute_policy_loss(tensor(a), tensor(b), *clip)
        pairs = [brute_force.ppo(x, y, *clip) for x, y in zip(a, b, strict=True)]
        torch.testing.assert_close(torch.stack([loss, fraction], 1), tensor(pairs), **LIMIT)

        kind = rng.choice(KL_TYPES)
        values = [brute_force.kl(x, y, kind) for x, y in zip(a, c, strict=True)]
        torch.testing.assert_close(compute_approx_kl(tensor(a), tensor(c), kind), tensor(values), **LIMIT)

        groups = [rng.randint(0, 5) for _ in range(length)]
        centred = normalize_by_group(a, groups, divide_by_std=False)
        means = {g: sum(x for x, h in zip(a, groups, strict=True) if h == g) / groups.count(g) for g in groups}
        assert centred == pytest.approx([x - means[g] for x, g in zip(a, groups, strict=True)], abs=1e-10)


def test_vocabulary_parallel_log_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probs_module, "_gather", lambda stats, group: torch.stack(group.exchange(stats), dim=1))
    rng = random.Random(1)
    for case in range(200):
        tp, width, rows = rng.choice([1, 2, 4]), rng.randint(1, 30), rng.randint(1, 20)
        vocab = rng.randint(1, tp * width)
        generator = torch.Generator().manual_seed(case)
        logits = torch.randn(rows, tp * width, dtype=torch.float64, generator=generator) * 10 ** rng.uniform(-2, 2)
        targets = torch.randint(vocab, (rows,), generator=generator)
        chunk, temperature = rng.randint(1, 25), rng.uniform(0.3, 2)
        weights = torch.randn(2, rows, dtype=torch.float64, generator=generator)

        whole = logits[:, :vocab].clone().requires_grad_()
        log_p = torch.log_softmax(whole / temperature, -1)
        expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        (expected[0] * weights[0] + expected[1] * weights[1]).sum().backward()

        def rank(
            group: ThreadGroup, logits=logits, targets=targets, weights=weights,
            options=(width, chunk, temperature, vocab),
        ) -> tuple[torch.Tensor, ...]:  # fmt: skip
            width, chunk, temperature, vocab = options
            part = logits[:, group.rank() * width :][:, :width].clone().requires_grad_()
            log_probs, entropy = log_probs_and_entropy(
                part, targets, tp_group=group, chunk_size=chunk, with_entropy=True, temperature=temperature,
                entropy_grad=True, vocab_size=vocab,
            )  # fmt: skip
            (log_probs * weights[0] + entropy * weights[1]).sum().backward()
            return log_probs.detach(), entropy.detach(), part.grad

        results = run_ranks(tp, rank)
        for log_probs, entropy, _ in results:
            torch.testing.assert_close(log_probs, expected[0].detach(), rtol=1e-12, atol=1e-10)
            torch.testing.assert_close(entropy, expected[1].detach(), rtol=1e-12, atol=1e-10)
        grad = torch.cat([result[2] for result in results], dim=1)[:, :vocab]
        torch.testing.assert_close(grad, whole.grad, rtol=1e-10, atol=1e-10)
