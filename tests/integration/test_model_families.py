"""Every model family on two ranks against transformers: logits, weights, gradients. One launch serves all tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.breadth import selected
from tests.support.distributed import run_distributed
from tests.support.megatron_model import assemble
from tests.support.megatron_references import Reference
from tests.support.model_families import CASES, FAMILIES, make_checkpoint, reference

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: make_checkpoint(folder, name) for name in selected(request, "name")}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def ranks(checkpoints: dict[str, str], scratch: Path, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    cases = selected(request, "name", "layout")
    arguments = {"checkpoints": checkpoints, "scratch": str(scratch), "cases": cases}
    return run_distributed("tests.support.model_families:some_families", 2, arguments, timeout=300)


@pytest.fixture(scope="module")
def references(checkpoints: dict[str, str]) -> dict[str, Reference]:
    return {name: reference(path, name) for name, path in checkpoints.items()}


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_logits_equal_transformers(name: str, layout: str, ranks: Any, references: Any) -> None:
    expected = references[name].logits
    seen = assemble([rank[f"{layout}/{name}"]["forward"] for rank in ranks], expected.shape[1])
    assert expected.std() > 0.3
    torch.testing.assert_close(seen, expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_weights_round_trip_bit_for_bit(name: str, layout: str, ranks: Any, references: Any) -> None:
    expected = {n: t for n, t in references[name].weights.items() if n not in FAMILIES[name].carried}
    for rank in ranks:
        seen = dict(rank[f"{layout}/{name}"]["weights"])
        assert seen.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[n]) for n, tensor in seen.items())
        assert rank[f"{layout}/{name}"]["described"]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_gradients_equal_autograd(name: str, layout: str, ranks: Any, references: Any) -> None:
    expected = references[name].gradients
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for rank in ranks:
        given = dict(rank[f"{layout}/{name}"]["gradients"])
        assert not any(gradient.any() for n, gradient in given.items() if ".indexer." in n)
        seen = {n: g for n, g in given.items() if not re.search(r"e_score_correction_bias|\.indexer\.|layer_scalar", n)}
        assert seen.keys() == expected.keys()
        for parameter, gradient in seen.items():
            error = (gradient - expected[parameter]).norm()
            assert error < 2e-5 * expected[parameter].norm() + 1e-7 * total, (parameter, error)
        norm = torch.stack([gradient.norm() for gradient in seen.values()]).norm()
        torch.testing.assert_close(norm, total, rtol=1e-5, atol=0)


@pytest.mark.parametrize("layout", ["tp2-sp", "pp2"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_has_every_tensor_of_the_source(
    name: str, layout: str, ranks: Any, references: Any, scratch: Path
) -> None:
    from slime.weights.hf.checkpoint import HfCheckpoint

    expected = references[name].weights
    with HfCheckpoint(scratch / f"{name}-{layout}") as exported:
        assert exported.names == expected.keys()
        assert all(torch.equal(exported.slice(n)[:], tensor) for n, tensor in expected.items())


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("deepseek_v3", "rope_parameters"),
        ("glm4", "post_mlp_layernorm"),
        ("deepseek_v32", "index_topk"),
        ("glm5", "the order of what the indexer rotates"),
        ("gemma3", "sliding_window"),
        ("gemma4", "sliding_window"),
        ("gemma4", "final_logit_softcapping"),
        ("gpt_oss", "sliding_window"),
        ("gpt_oss", "rope_parameters"),
        ("gpt_oss", "sinks"),
        ("gpt_oss", "the clamped gates"),
    ],
)
def test_what_makes_a_family_matters(name: str, part: str, checkpoints: Any, references: Any) -> None:
    """A comparison would prove nothing if the logits of these short sequences did not depend on it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoints[name], dtype=torch.float32)
    if part == "rope_parameters":
        model.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        weights, model = model.state_dict(), type(model)(model.config)
        model.load_state_dict(weights)
    elif part == "sliding_window":
        model.config.sliding_window = model.config.max_position_embeddings
    elif part == "final_logit_softcapping":
        model.config.final_logit_softcapping = None
    elif part == "index_topk":
        for layer in model.model.layers:
            layer.self_attn.indexer.index_topk = model.config.max_position_embeddings
    elif part == "sinks":
        for layer in model.model.layers:
            layer.self_attn.sinks.data.fill_(-1e9)
    elif part == "the clamped gates":
        for layer in model.model.layers:
            layer.mlp.experts.limit = 1e9
    elif part == "post_mlp_layernorm":
        for layer in model.model.layers:
            layer.post_mlp_layernorm = torch.nn.Identity()
    from tests.support.megatron_model import sequences

    with torch.no_grad():
        logits = torch.cat([model(s[None]).logits[0] for s in sequences(model.config.vocab_size)])
    assert (logits - references[name].logits).abs().max() > 1e-2
