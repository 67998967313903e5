"""Sparse attention in training: recomputation finds the right selection; an indexer is saved, and never changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.distributed import run_distributed
from tests.support.megatron_model import assemble
from tests.support.megatron_references import Reference
from tests.support.model_families import make_checkpoint, reference
from tests.support.sparse_ranks import RECOMPUTED

pytestmark = pytest.mark.integration
NAME = "glm5.2"  # layers that use the selection of the one before


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), NAME)


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> Reference:
    return reference(checkpoint, NAME)


@pytest.fixture(scope="module")
def recomputed(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    arguments = {"checkpoint": checkpoint, "scratch": str(tmp_path_factory.mktemp("scratch"))}
    return run_distributed("tests.support.sparse_ranks:recomputed", 2, arguments)


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputation_changes_nothing(name: str, recomputed: list[dict[str, Any]], expected: Reference) -> None:
    seen = assemble([rank[name]["forward"] for rank in recomputed], expected.logits.shape[1])
    torch.testing.assert_close(seen, expected.logits, atol=5e-5, rtol=0)
    total = torch.stack([gradient.norm() for gradient in expected.gradients.values()]).norm()
    for rank in recomputed:
        gradients = dict(rank[name]["gradients"])
        for parameter, gradient in expected.gradients.items():
            error = (gradients[parameter] - gradient).norm()
            assert error < 2e-5 * gradient.norm() + 1e-7 * total, (parameter, error)


@pytest.fixture(scope="module")
def resumed(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    layouts = [
        {"pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ]
    arguments = {"checkpoint": checkpoint, "save": str(tmp_path_factory.mktemp("save")), "layouts": layouts}
    return run_distributed("tests.support.sparse_ranks:resumed", 2, arguments)[0]


def test_training_changes_all_but_the_indexer(resumed: list[dict[str, Any]]) -> None:
    """Weight decay does not either."""
    before, after = resumed[0]["before"], resumed[0]["weights"]
    indexer = {name for name in before if ".indexer." in name}
    assert len(indexer) == 4 * 5  # of layers 0, 2, 4 and 6
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in unchanged if "e_score_correction_bias" not in name} == indexer


def test_a_run_continues_from_its_checkpoint(resumed: list[dict[str, Any]]) -> None:
    """Under the layout that it was saved under, and under another one."""
    uninterrupted, *others = resumed
    for other in others:
        assert all(torch.equal(other["loaded"][name], tensor) for name, tensor in uninterrupted["loaded"].items())
        for name, tensor in uninterrupted["weights"].items():
            torch.testing.assert_close(other["weights"][name], tensor, atol=2e-5, rtol=1e-4)
        for seen, wanted in zip(other["steps"], uninterrupted["steps"], strict=True):
            assert seen["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
