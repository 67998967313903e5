"""Vocabulary-parallel log-probs on many random cases, with shapes and scales beyond those of the quick tests."""

from __future__ import annotations

import random

import pytest
import torch

from slime.algorithms import log_probs as log_probs_module
from slime.algorithms.log_probs import log_probs_and_entropy
from tests.unit.algorithms.thread_group import ThreadGroup, run_ranks

pytestmark = pytest.mark.soak


def test_vocabulary_parallel_log_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        log_probs_module, "gather_ranks", lambda stats, group: torch.stack(group.exchange(stats), dim=1)
    )
    rng = random.Random(1)
    for case in range(1000):
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
