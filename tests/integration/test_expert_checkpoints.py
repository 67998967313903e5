"""A checkpoint of a model with experts is resumed however they are divided, and where pipeline stages have none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed import run_distributed
from tests.support.trainer import tiny_checkpoint

EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}  # the first stage is dense
PLAIN: dict[str, Any] = {"use_distributed_optimizer": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "EP1": {},
    "EP2": EP2,
    "TP2": TP2,
    "TP2 EP2 ETP1": {**TP2, **EP2, "expert_tensor_parallel_size": 1},
    "PP2": PP2,
    "one optimizer": {"unmarked": True},
    "EP1, TE's names": {"te_names": True},
    "EP2, plain": {**EP2, **PLAIN},
    "PP2, plain": {**PP2, **PLAIN},
}
QUICK = {
    "EP2": ["EP1", "EP1, TE's names", "TP2 EP2 ETP1", "PP2"], "PP2": ["EP2"], "one optimizer": ["EP2"],
    "PP2, plain": ["EP2, plain"],
}  # fmt: skip
FURTHER = {
    "EP1": ["EP2", "TP2", "PP2"],
    "EP2": ["EP2", "TP2"],
    "PP2": ["EP1", "TP2", "PP2", "TP2 EP2 ETP1"],
    "TP2 EP2 ETP1": ["EP1", "PP2"],
    "one optimizer": ["EP1", "TP2", "PP2"],
    "EP2, plain": ["EP2, plain", "PP2, plain"],
    "PP2, plain": ["PP2, plain"],
}


@dataclass
class Runs:
    """By rank and name what was trained; by name the tensors of its checkpoint."""

    by_rank: list[dict[str, Any]]
    tensors: dict[str, dict[str, torch.Tensor]]


def trained(folder: Path, pairs: dict[str, list[str]]) -> Runs:
    fields = {"num_hidden_layers": 4, "num_experts": 4, "mlp_only_layers": [0, 1]}
    checkpoint = tiny_checkpoint(folder / "model", seed=0, family="qwen3_moe", **fields)
    arguments = {"checkpoint": checkpoint, "folder": str(folder), "layouts": LAYOUTS, "pairs": pairs}
    here = "tests.support.expert_resume_ranks"
    by_rank = run_distributed(f"{here}:resume_everywhere", 2, arguments, timeout=400)
    directories = {"directories": [run["directory"] for run in by_rank[0].values()]}
    read = run_distributed(f"{here}:plain_tensors", 1, directories, timeout=120)[0]
    return Runs(by_rank, dict(zip(by_rank[0], read, strict=True)))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return trained(tmp_path_factory.mktemp("experts"), QUICK)


@pytest.fixture(scope="module")
def further(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return trained(tmp_path_factory.mktemp("more experts"), FURTHER)


def assert_same_state(runs: Runs, saved: str, loaded: str) -> None:
    expected, again = runs.tensors[saved], runs.tensors[f"{saved} -> {loaded}"]
    kept = {name for name in expected if "rng_state" not in name}
    assert {name for name in again if "rng_state" not in name} == kept
    moments = [name for name in kept if name.startswith("optimizer.state.exp_avg_sq") and ".experts." in name]
    assert len(moments) >= 2
    assert all(bool((expected[name] > 0).any()) for name in moments)
    for name in kept:
        # Tensor-parallel ranks have equal parts of the vocabulary, so its padding depends on their number.
        parts = [again[name], expected[name]]
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            parts = [part[: min(map(len, parts))] for part in parts]
        assert torch.equal(*parts), name


def assert_same_training(runs: Runs, saved: str, loaded: str) -> None:
    uninterrupted, resumed = runs.by_rank[-1][saved], runs.by_rank[-1][f"{saved} -> {loaded}"]
    for expected, step in zip(uninterrupted["steps"], resumed["steps"], strict=True):
        for name in ("loss", "grad_norm", "entropy_loss"):
            assert step[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    for name, weight in uninterrupted["weights"].items():
        # Another number of steps, or other moments, would show in the third digit of an update of about 1e-2.
        assert torch.allclose(resumed["weights"][name], weight, rtol=0, atol=2e-6), name


@pytest.mark.parametrize(("saved", "loaded"), [(a, b) for a in QUICK for b in QUICK[a]])
def test_resume_under_another_layout(saved: str, loaded: str, quick: Runs) -> None:
    assert_same_state(quick, saved, loaded)
    assert_same_training(quick, saved, loaded)


@pytest.mark.soak
@pytest.mark.parametrize(("saved", "loaded"), [(a, b) for a in FURTHER for b in FURTHER[a]])
def test_resume_under_more_layouts(saved: str, loaded: str, further: Runs) -> None:
    assert_same_state(further, saved, loaded)
    assert_same_training(further, saved, loaded)


def test_the_number_of_steps_is_known_where_there_are_no_experts(quick: Runs) -> None:
    """Rank 0 holds the dense stage and speaks for all: the experts' optimizer has stepped as often as the other."""
    directory = Path(quick.by_rank[0]["PP2"]["directory"])
    state = torch.load(directory / "common.pt", weights_only=False)["optimizer"]
    steps = [group["step"] for part in (0, 1) for group in state[part]["optimizer"]["param_groups"]]
    assert len(steps) >= 3
    assert set(steps) == {1}
