"""Losses, gradient norms and what comes of them do not depend on the parallel layout or on the micro-batches."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributed import run_distributed
from tests.support.trainer import tiny_checkpoint

# Two optimiser steps per rollout, so that ratios differ from one; every term of the loss is on.
GRPO = {
    "global_batch_size": 4,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "entropy_coef": 0.01,
    "use_tis": True,
    "normalize_advantages": True,
    "use_rollout_entropy": True,
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": GRPO,
    "gspo": {**GRPO, "advantage_estimator": "gspo", "use_opsm": True, "opsm_delta": 1e-4},
    "reinforce++": {
        "advantage_estimator": "reinforce_plus_plus",
        "kl_coef": 0.05,
        "gamma": 0.9,
        "normalize_advantages": True,
        "global_batch_size": 4,
    },
    "per token": {**GRPO, "calculate_per_token_loss": True},
    "sft": {"loss_type": "sft_loss", "compute_advantages_and_returns": False, "global_batch_size": 4},
}
WITH_REF = {"grpo", "gspo", "reinforce++", "per token"}
ALONE: dict[str, dict[str, Any]] = {
    "1 process": {},
    "packed by tokens": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64},
    "packed 4 samples": {"micro_batch_size": 4},
}
PAIRED: dict[str, dict[str, Any]] = {
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
    "PP2, packed": {"pipeline_model_parallel_size": 2, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 64},
    "PP2 x VPP2": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "overlap_p2p_comm": True,
    },
    "CP2": {"context_parallel_size": 2},
    "CP2, packed": {"context_parallel_size": 2, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 32},
    "DP2": {},
    "DP2, overlapped": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "DP2, plain optimizer": {"use_distributed_optimizer": False},
}
CASES = [(a, layout) for layout in [*ALONE, *PAIRED] for a in ALGORITHMS if (a, layout) != (a, "1 process")]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """By (algorithm, layout): the reports of two rollouts, from a rank of the last pipeline stage."""
    folder = tmp_path_factory.mktemp("layouts")
    checkpoint = tiny_checkpoint(folder / "actor", seed=0, num_hidden_layers=4)
    reference = tiny_checkpoint(folder / "ref", seed=1, num_hidden_layers=4)
    found = {}
    for world_size, layouts in ((1, ALONE), (2, PAIRED)):
        cases = [(a, layout) for layout in layouts for a in ALGORITHMS]
        scenarios = [
            {
                # Adam divides by the gradient's size: with the usual eps the rounding of tiny gradients would be as
                # large as a step, and runs would drift apart after the first.
                "args": {
                    "load": checkpoint,
                    "ref_load": reference,
                    "adam_eps": 1e-3,
                    "lr": 1e-2,
                    **ALGORITHMS[a],
                    **layouts[layout],
                },
                "with_ref": a in WITH_REF,
                "rollouts": 2,
            }
            for a, layout in cases
        ]
        ranks = run_distributed(
            "tests.support.trainer_ranks:run_scenarios",
            world_size,
            {"checkpoint": checkpoint, "scenarios": scenarios},
            timeout=600,
        )
        found.update({case: result["reports"] for case, result in zip(cases, ranks[-1], strict=True)})
    return found


@pytest.mark.parametrize(("algorithm", "layout"), CASES)
def test_layout_does_not_matter(reports: Any, algorithm: str, layout: str) -> None:
    alone, here = reports[algorithm, "1 process"], reports[algorithm, layout]
    for expected_report, report in zip(alone, here, strict=True):
        for expected, step in zip(expected_report["steps"], report["steps"], strict=True):
            assert step.keys() == expected.keys()
            for name, value in expected.items():
                # Terms of about one cancel in these sums: 1e-5 of the terms, not of what is left.
                assert step[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
        for name, value in expected_report["rollout"].items():
            assert report["rollout"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_the_cases_differ_from_each_other(reports: Any) -> None:
    """The comparisons above would mean nothing if every algorithm had the same numbers."""
    norms = {a: reports[a, "1 process"][1]["steps"][1]["grad_norm"] for a in ALGORITHMS}
    values = sorted(norms.values())
    assert all(b - a > 1e-3 * b for a, b in itertools.pairwise(values)), norms
    second_step = reports["grpo", "1 process"][1]["steps"][1]
    assert second_step["pg_clipfrac"] > 0
    assert second_step["kl_loss"] > 0
    assert second_step["grad_norm"] > 0


def test_the_report_names_what_the_dashboard_shows(reports: Any) -> None:
    step = reports["grpo", "1 process"][0]["steps"][0]
    assert {
        "loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "train_rollout_logprob_abs_diff", "kl_loss", "ois",
        "tis", "tis_clipfrac", "tis_abs", "grad_norm", "lr-pg_0", "global_batch_size",
    } <= step.keys()  # fmt: skip
    rollout = reports["grpo", "1 process"][0]["rollout"]
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
