"""Adapters of every model family, on two ranks, are what their merged weights are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.distributed import run_distributed
from tests.support.model_families import FAMILIES, LAYOUTS, families_of, make_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]  # the first test waits for all cases

CASES = [(name, layout) for layout in LAYOUTS for name in families_of(layout)]
MLP = {"gate_proj", "up_proj", "down_proj"}
FULL = {"q_proj", "k_proj", "v_proj", "o_proj"}
LATENT = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
PROJECTIONS = {
    "glm4": {*FULL, "gate_up_proj", "down_proj"},
    "deepseek_v3": {*LATENT, *MLP},
    "moonlight": {*LATENT, *MLP, "q_proj"} - {"q_a_proj", "q_b_proj"},
    "glm4_moe": {*FULL, *MLP},
    "minimax_m2": {*FULL, "w1", "w2", "w3"},
    "qwen3_next": {*FULL, *MLP},
    "qwen3_5": {*FULL, *MLP},
    "gemma4": {*FULL, *MLP},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("families")
    checkpoints = {name: make_checkpoint(folder, name) for name in FAMILIES}
    scratch = tmp_path_factory.mktemp("merged")
    arguments = {"checkpoints": checkpoints, "layouts": LAYOUTS, "scratch": str(scratch)}
    return run_distributed("tests.support.lora_ranks:all_families", 2, arguments, timeout=3000)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_adapters_are_their_merged_weights(name: str, layout: str, results: list[dict[str, Any]]) -> None:
    for rank in results:
        found = rank[f"{layout}/{name}"]
        assert found["logits"] < 5e-5
        assert found["gradients"] < 1e-5
        adapted = {entry.removesuffix(".weight").rsplit(".", 2)[-2] for entry in found["names"]}
        assert adapted == PROJECTIONS.get(name, adapted)
