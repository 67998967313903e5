"""Following the page "Add a model family" is enough: its made-up family is loaded, computed and exported."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.acme_family import PAGE, renamed, write_checkpoint
from tests.support.distributed import run_distributed
from tests.support.megatron_model import assemble
from tests.support.megatron_references import make_checkpoints, reference
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


def test_the_page_names_four_files_that_are_there() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == 4
    assert {fence.language for fence in read_page(PAGE).fences} == {"python", "yaml", "bash"}
