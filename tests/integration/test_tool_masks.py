"""Advantages step from one trained token to the next in every parallel layout, whatever tools wrote in between."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed import run_distributed
from tests.support.tool_mask_ranks import FLAGS, estimates, tool_data
from tests.support.trainer import tiny_checkpoint
from tests.unit.algorithms import brute_force

TP2, PP2, CP2 = ({f"{kind}_parallel_size": 2} for kind in ("tensor_model", "pipeline_model", "context"))
PACKED = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {"TP2": TP2, "PP2": PP2, "CP2": CP2, "CP2, packed": {**CP2, **PACKED}, "DP2": {}},
    4: {
        "TP2 x CP2": {**TP2, **CP2},
        "PP2 x CP2": {**PP2, **CP2},
        "CP2 x DP2": CP2,
        "CP4": {"context_parallel_size": 4},
        "TP2 x PP2": {**TP2, **PP2},
        "DP4": {},
    },
}


def expected(seed: int, estimator: str, index: int) -> tuple[list[float], list[float]]:
    """(advantages, returns) of a sample by loops over its trained tokens."""
    data = tool_data(seed)
    reward, mask, values, policy, reference = (
        data[name][index - 100] for name in ("rewards", "loss_masks", "values", "log_probs", "ref_log_probs")
    )
    kl = [a - b for a, b in zip(policy, reference, strict=True)]
    coef, gamma, lambd = FLAGS["kl_coef"], FLAGS["gamma"], FLAGS["lambd"]
    if estimator == "ppo":
        return brute_force.ppo_advantages(reward, kl, values, mask, coef, gamma, lambd)
    returns = brute_force.reinforce_plus_plus(reward, kl, mask, coef, gamma)
    return returns, returns


def compare(folder: Path, ranks: int, seeds: list[int]) -> None:
    checkpoint = tiny_checkpoint(folder / "model", seed=0)
    arguments = {"checkpoint": checkpoint, "layouts": list(LAYOUTS[ranks].values()), "seeds": seeds}
    reports = run_distributed(f"{estimates.__module__}:estimates", ranks, arguments, timeout=600)
    for number, layout in enumerate(LAYOUTS[ranks]):
        of_layout = [report[number] for report in reports]
        for seed, estimator in itertools.product(seeds, ("ppo", "reinforce_plus_plus")):
            for index in range(100, 108):
                rows = zip(("advantages", "returns"), expected(seed, estimator, index), strict=True)
                for name, wanted in rows:
                    found = [r[key] for r in of_layout if (key := (seed, estimator, name, index)) in r]
                    assert found, f"{layout}: no rank has {name} of sample {index}"
                    for values in found:
                        torch.testing.assert_close(
                            values, torch.tensor(wanted, dtype=values.dtype), rtol=0, atol=1e-5, msg=f"{layout} {name}"
                        )


def test_advantages_with_tools_equal_loops_over_trained_tokens(tmp_path: Path) -> None:
    compare(tmp_path, 2, [0, 1, 2])


@pytest.mark.soak
@pytest.mark.parametrize("ranks", sorted(LAYOUTS))
def test_two_hundred_seeds_on_up_to_four_ranks(tmp_path: Path, ranks: int) -> None:
    compare(tmp_path, ranks, list(range(100, 300)))
