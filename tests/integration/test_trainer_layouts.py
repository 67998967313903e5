"""Losses, gradient norms and what comes of them do not depend on the parallel layout or on the micro-batches.

Every algorithm under one layout and GRPO under the most; all of them under all layouts are in tests/soak.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.support.layouts import (
    ALGORITHMS,
    ALONE,
    FLOAT64,
    FP32,
    LAYOUTS,
    Result,
    assert_equal,
    measure,
)
from tests.support.trainer import tiny_checkpoint

EVERY_ALGORITHM = "CP2, packed"
GRPO_ONLY = [
    "PP2 x VPP2",
    "DP2, packed, balanced",
    "64 tokens per micro-batch",
    "TP2+SP",
    "samples of a step in reverse",
    "recompute selective, more",
    "DP2, overlapped",
]
# In float64 nothing hides behind rounding; fp32 is what a CPU trains in.
CASES = {
    FLOAT64: [
        *((algorithm, EVERY_ALGORITHM) for algorithm in ALGORITHMS),
        *(("grpo", layout) for layout in GRPO_ONLY),
    ],
    FP32: [("grpo", layout) for layout in [EVERY_ALGORITHM, "PP2 x VPP2", "TP2+SP"]],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[tuple[str, str], Result]]:
    """By precision and (algorithm, layout)."""
    return {
        precision: measure(tmp_path_factory.mktemp(precision), precision, cases) for precision, cases in CASES.items()
    }


@pytest.mark.parametrize(
    ("precision", "algorithm", "layout"), [(p, *case) for p, cases in CASES.items() for case in cases]
)
def test_layout_does_not_matter(results: Any, precision: str, algorithm: str, layout: str) -> None:
    reference = results[precision][algorithm, LAYOUTS[layout].reference]
    assert_equal(results[precision][algorithm, layout], reference, precision)


def test_the_cases_differ_from_each_other(results: Any) -> None:
    """The comparisons above would mean nothing if every algorithm had the same numbers."""
    norms = {a: results[FLOAT64][a, ALONE].steps[-1]["grad_norm"] for a in ALGORITHMS}
    values = sorted(norms.values())
    assert all(b - a > 1e-4 * b for a, b in itertools.pairwise(values)), norms
    last = results[FLOAT64]["grpo", ALONE].steps[-1]
    assert last["pg_clipfrac"] > 0
    assert last["kl_loss"] > 0
    assert last["grad_norm"] > 0


def test_the_report_names_what_the_dashboard_shows(results: Any) -> None:
    result = results[FP32]["grpo", ALONE]
    assert {
        "loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "train_rollout_logprob_abs_diff", "kl_loss", "ois",
        "tis", "tis_clipfrac", "tis_abs", "grad_norm", "lr-pg_0", "global_batch_size",
    } <= result.steps[0].keys()  # fmt: skip
    rollout = result.rollouts[0]
    assert {
        f"rollout/{name}"
        for name in (
            "response_lengths", "total_lengths", "rewards", "raw_reward", "truncated", "log_probs", "ref_log_probs",
            "rollout_log_probs", "returns", "advantages", "kl", "entropy",
        )
    } <= rollout.keys()  # fmt: skip
    assert "rollout/partition" not in rollout


def test_checkpoint_fixture_is_not_uniform(tmp_path: Path) -> None:
    """Guards the guard: with uniform predictions log-probs of all tokens would agree in any layout."""
    import torch

    from tests.support.plain_grpo import load, token_log_probs

    model = load(tiny_checkpoint(tmp_path / "m", seed=0))
    with torch.no_grad():
        values, _ = token_log_probs(model, list(range(40)), 30, 0.7)
    assert values.std() > 0.3
