"""Runs that train no policy build no optimizer and no gradients, and need no optimizer state in the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.distributed import run_distributed
from tests.support.trainer import tiny_checkpoint

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"fp32": {}, "bf16": {"bf16": True, "fp32": False}},
    2: {
        "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "PP2 x VPP2": {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "overlap_p2p_comm": True,
        },
        "DP2": {},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights-alone")


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_an_evaluation_has_weights_alone(folder: Path, ranks: int) -> None:
    checkpoint = tiny_checkpoint(folder / f"model-{ranks}", seed=0, num_hidden_layers=4)
    arguments = {"checkpoint": checkpoint, "folder": str(folder / str(ranks)), "layouts": [*LAYOUTS[ranks].values()]}
    for rank in run_distributed("tests.support.weights_alone_ranks:compare", ranks, arguments, timeout=400):
        for layout, seen in zip(LAYOUTS[ranks], rank, strict=True):
            assert "no optimizer state" in seen.pop("resumed"), layout
            assert "does not train the policy (--num-rollout 0" in seen.pop("refusal"), layout
            assert seen == {
                "optimizer": None, "scheduler": None, "gradient buffers": 0, "policies on the host": [], "start": 1,
                "log-probs": True, "weights": True, "weights asleep": True, "bytes asleep": 0, "awake": True,
                "fresh start": True,
            }, layout  # fmt: skip


def test_adapters_and_critics(folder: Path) -> None:
    checkpoint = tiny_checkpoint(folder / "other", seed=0)
    arguments = {"checkpoint": checkpoint, "folder": str(folder / "others")}
    [found] = run_distributed("tests.support.weights_alone_ranks:others", 1, arguments, timeout=300)
    assert found == {
        "start": 1, "adapters": True, "critic alone in some": False, "critic alone in all": True,
    }  # fmt: skip
