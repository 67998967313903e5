"""Checkpoints of ``--ckpt-format torch`` and ``torch_dcp`` resume a run exactly, or say why they cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.breadth import few, selected
from tests.support.distributed import run_distributed
from tests.support.trainer import tiny_checkpoint

TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
TP1: dict[str, Any] = {"tensor_model_parallel_size": 1, "sequence_parallel": False}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
PLAIN: dict[str, Any] = {"use_distributed_optimizer": False}
CP2: dict[str, Any] = {"context_parallel_size": 2}

EXACT: dict[str, dict[str, Any]] = {
    "torch TP2": {"form": "torch", "flags": TP2},
    "torch PP2": {"form": "torch", "flags": PP2},
    "torch EP2": {"form": "torch", "flags": EP2, "family": "experts"},
    "torch TP2 EP2": {
        "form": "torch",
        "flags": {**TP2, **EP2, "expert_tensor_parallel_size": 1},
        "family": "experts",
    },
    "torch DP2 plain": {"form": "torch", "flags": PLAIN},
    "torch_dcp DP2": {"form": "torch_dcp", "flags": {}},
    "torch_dcp DP2 plain": {"form": "torch_dcp", "flags": PLAIN, "family": "experts"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "torch DP2 as CP2": {"form": "torch", "flags": {}, "then": CP2},
    "torch_dcp DP2 as CP2": {"form": "torch_dcp", "flags": {}, "then": CP2},
    "torch TP2 as PP2": {"form": "torch", "flags": TP2, "then": {**PP2, **TP1}},
    "torch DP2 as EP2": {"form": "torch", "flags": {}, "then": EP2, "family": "experts"},
    "torch_dcp DP2 as TP2": {"form": "torch_dcp", "flags": {}, "then": TP2},
    "torch DP2 as plain": {"form": "torch", "flags": {}, "then": PLAIN},
    "torch cut off": {"form": "torch", "flags": TP2, "cut": "mp_rank_00/model_optim_rng.pt"},
    "torch optimizer cut off": {"form": "torch", "flags": PP2, "cut": "mp_rank_00_000/distrib_optim.pt"},
    "torch_dcp cut off": {"form": "torch_dcp", "flags": {}, "cut": "__0_0.distcp"},
}


QUICK = ("torch TP2", "torch DP2 plain", "torch_dcp DP2")


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("formats")
    checkpoints = {
        "dense": tiny_checkpoint(folder / "dense", seed=0),
        "experts": tiny_checkpoint(folder / "experts", seed=0, family="qwen3_moe", num_experts=4),
    }
    cases = {name: {**EXACT, **OTHERS}[name] for name in selected(request, "case")}
    arguments = {"folder": str(folder), "checkpoints": checkpoints, "cases": cases}
    return run_distributed("tests.support.checkpoint_format_ranks:resume_each", 2, arguments, timeout=300)


FILES = {
    "torch TP2": ["mp_rank_00", "mp_rank_01"],
    "torch PP2": ["mp_rank_00_000", "mp_rank_00_001"],
    "torch EP2": ["mp_rank_00_000", "mp_rank_00_001"],
    "torch TP2 EP2": ["mp_rank_00_000", "mp_rank_01_001"],
    "torch DP2 plain": ["mp_rank_00"],
}


@pytest.mark.parametrize("case", few(EXACT, QUICK))
def test_a_run_is_resumed_bit_for_bit(case: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "error" not in rank[case], rank[case]["error"]
        assert rank[case]["start"] == 1
        assert rank[case]["loaded"]
        assert rank[case]["same"]
        assert rank[case]["moved"] > 1e-4
    if case in FILES:  # as Megatron-LM names them
        names = ["model_optim_rng.pt"] if "plain" in case else ["distrib_optim.pt", "model_optim_rng.pt"]
        of_ranks = [f"{rank}/{name}" for rank in FILES[case] for name in names]
        assert found[0][case]["files"] == ["digests.json", *of_ranks]


@pytest.mark.parametrize("case", few(["torch DP2 as CP2", "torch_dcp DP2 as CP2"], ["torch_dcp DP2 as CP2"]))
def test_data_and_context_parallelism_may_change(case: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        resumed = rank[case]
        assert "error" not in resumed, resumed["error"]
        assert resumed["close"] < 2e-3 * max(1.0, resumed["moved"])
        before, after = (step[0] for step in resumed["steps"])
        assert after["loss"] == pytest.approx(before["loss"], rel=1e-4, abs=1e-6)


REFUSED = [
    ("torch TP2 as PP2", "--tensor-model-parallel-size 1, --pipeline-model-parallel-size 2"),
    ("torch DP2 as EP2", "it holds mp_rank_00, and this run has"),
    ("torch_dcp DP2 as TP2", "it holds the whole model, and this run has --tensor-model-parallel-size 2"),
    ("torch DP2 as plain", "was saved with --use-distributed-optimizer"),
    ("torch cut off", "a file of it is damaged or cut off"),
    ("torch optimizer cut off", "distrib_optim.pt is damaged or cut off"),
    ("torch_dcp cut off", "a file of it is damaged or cut off"),
]


@pytest.mark.parametrize(
    ("case", "says"), few(REFUSED, [case for case in REFUSED if case[0] in ("torch TP2 as PP2", "torch_dcp cut off")])
)
def test_what_cannot_be_read_is_said_on_all_ranks(case: str, says: str, found: list[dict[str, Any]]) -> None:
    messages = [rank[case]["error"] for rank in found]
    assert says in messages[0]
    assert "iter_0000000" in messages[1]


def test_other_uses_of_such_a_checkpoint(tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "checkpoint": tiny_checkpoint(tmp_path / "model", seed=0)}
    target = "tests.support.checkpoint_format_ranks:convert_and_start_from"
    for rank in run_distributed(target, 2, arguments, timeout=200):
        assert rank["start"] == 2
        for use in ("by torch_dist", "reference", "base of adapters", "critic of the model", "critic"):
            assert rank[use], use
        assert "look at --only-train-params-name-list" in rank["frozen"]
