"""The combinations of parallel dimensions that need four ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.distributed import run_distributed
from tests.support.megatron_checks import FOUR_RANK_LAYOUTS, MODELS_OF
from tests.support.megatron_model import assemble
from tests.support.megatron_references import MODELS, make_checkpoints, reference

pytestmark = pytest.mark.soak


def test_logits_weights_and_gradients(tmp_path: Path) -> None:
    checkpoints = make_checkpoints(tmp_path)
    (tmp_path / "exports").mkdir()
    arguments = {"checkpoints": checkpoints, "scratch": str(tmp_path / "exports"), "layouts": FOUR_RANK_LAYOUTS}
    ranks = run_distributed("tests.support.megatron_checks:all_layouts", 4, arguments, timeout=600)
    for name, path in checkpoints.items():
        expected = reference(path)
        for layout in FOUR_RANK_LAYOUTS:
            if name not in MODELS_OF.get(layout, MODELS):
                continue
            results = [rank[f"{layout}/{name}"] for rank in ranks]
            logits = assemble([result["forward"] for result in results], expected.logits.shape[1])
            torch.testing.assert_close(logits, expected.logits, atol=2e-5, rtol=0)
            for result in results:
                weights, gradients = dict(result["weights"]), dict(result["gradients"])
                assert weights.keys() == expected.weights.keys()
                assert all(torch.equal(weights[n], expected.weights[n]) for n in weights), (name, layout)
                errors = {
                    n: (g - expected.gradients[n]).norm() / expected.gradients[n].norm() for n, g in gradients.items()
                }
                assert max(errors.values()) < 1e-5, (name, layout, errors)
