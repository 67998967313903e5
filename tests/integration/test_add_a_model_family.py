"""Following the page "Add a model family" is enough: its made-up family is loaded, computed and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import vision_families
from tests.support.acme_family import PAGE, renamed, renamed_tower, write_checkpoint, write_vision_checkpoint
from tests.support.distributed import run_distributed
from tests.support.megatron_model import assemble
from tests.support.megatron_references import Reference, make_checkpoints, reference
from tools.markdown import read_page


def test_the_made_up_family_equals_transformers(tmp_path: Path) -> None:
    from slime.weights.hf.checkpoint import HfCheckpoint

    source = make_checkpoints(tmp_path / "sources")["qwen2"]
    write_checkpoint(source, tmp_path / "acme")
    [rank] = run_distributed("tests.support.acme_family:build", 1, {"folder": str(tmp_path)})
    assert rank["read"] == {"num_layers": 2, "add_qkv_bias": True, "qk_layernorm": False, "swiglu": True}
    expected = reference(source, torch.float64)
    logits = assemble([rank["forward"]], expected.logits.shape[1])
    torch.testing.assert_close(logits.double(), expected.logits, atol=5e-5, rtol=0)
    weights = {renamed(name): tensor for name, tensor in expected.weights.items()}
    seen = dict(rank["weights"])
    assert seen.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in seen.items())
    gradients = {renamed(name): gradient for name, gradient in expected.gradients.items()}
    for name, gradient in rank["gradients"]:
        rounding = 1e-6 * float(gradients[name].abs().max())  # of a sum in float32, whose terms are as large
        torch.testing.assert_close(gradient.double(), gradients[name], rtol=1e-3, atol=rounding)
    with HfCheckpoint(tmp_path / "exported") as exported:
        assert exported.names == weights.keys()


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("vision")
    source = vision_families.make_checkpoint(folder / "sources", "qwen3_vl")
    write_vision_checkpoint(source, folder / "acme_vl")
    [rank] = run_distributed("tests.support.acme_family:build_vision", 1, {"folder": str(folder)})
    return folder, vision_families.reference(source, "qwen3_vl", vision_families.samples()), rank


@pytest.mark.parametrize("kind", ["frozen", "trained"])
def test_the_made_up_vision_language_family_equals_transformers(kind: str, vision: Any) -> None:
    from slime.weights.hf.checkpoint import HfCheckpoint

    folder, expected, found = vision
    seen = found[kind]
    logits = assemble([seen["forward"]], expected.logits.shape[1], len(expected.logits))
    torch.testing.assert_close(logits, expected.logits, atol=5e-5, rtol=0)
    is_part = {n: kind == "trained" or not vision_families.is_tower(n) for n in expected.weights}
    weights = {renamed_tower(n): t for n, t in expected.weights.items() if is_part[n]}
    assert dict(seen["weights"]).keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in seen["weights"])
    gradients = {renamed_tower(n): g for n, g in expected.gradients.items() if is_part[n]}
    total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for name, gradient in seen["gradients"]:
        error = (gradient - gradients[name]).norm()
        assert error < 2e-5 * gradients[name].norm() + 1e-7 * total, (name, error)
    with HfCheckpoint(folder / kind) as exported:
        assert exported.names == {renamed_tower(name) for name in expected.weights}


def test_the_page_names_four_files_that_are_there() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == 4
    assert {fence.language for fence in read_page(PAGE).fences} == {"python", "yaml", "bash"}
