"""The collective paths over a real process group of two: the same numbers as one process has."""

from __future__ import annotations

import pytest
import torch

from slime.algorithms.log_probs import log_probs_and_entropy
from slime.algorithms.whitening import masked_whiten
from slime.batching.context_parallel import slice_response_with_cp
from tests.support.distributed import run_distributed

pytestmark = pytest.mark.slow

LENGTHS = [(7, 4), (12, 9), (3, 1)]


def test_two_ranks_compute_what_one_does() -> None:
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(8, 10, dtype=torch.float64, generator=generator)
    targets = torch.randint(10, (8,), generator=generator)
    values = [torch.randn(response, dtype=torch.float64, generator=generator) for _, response in LENGTHS]
    ranks = run_distributed(
        "tests.unit.algorithms.two_ranks:collectives",
        2,
        {"logits": logits, "targets": targets, "lengths": LENGTHS, "values": values},
        timeout=120,
    )

    logits.requires_grad_()
    log_probs, entropy = log_probs_and_entropy(logits, targets, with_entropy=True, entropy_grad=True)
    (log_probs.sum() + entropy.sum()).backward()
    whitened = masked_whiten(torch.cat(values), torch.ones(sum(len(v) for v in values)))
    exact = {"rtol": 0, "atol": 1e-12}
    for rank, result in enumerate(ranks):
        torch.testing.assert_close(result["log_probs"], log_probs.detach(), **exact)
        for name in ("legacy", "legacy, default group"):
            torch.testing.assert_close(result[name], log_probs.detach().unsqueeze(1), **exact)
        assert result["legacy, no rows"] == [[], []]
        torch.testing.assert_close(result["entropy"], entropy.detach(), **exact)
        torch.testing.assert_close(result["gathered"], values, **exact)
        for grad, (total, response) in zip(result["local_grads"], LENGTHS, strict=True):
            expected = slice_response_with_cp(
                3.0 * torch.arange(response, dtype=torch.float64), total, response, cp_rank=rank, cp_size=2
            )
            torch.testing.assert_close(grad, expected, **exact)
    torch.testing.assert_close(torch.cat([result["logits_grad"] for result in ranks], 1), logits.grad, **exact)
    torch.testing.assert_close(torch.cat([result["whitened"] for result in ranks]), whitened, **exact)
