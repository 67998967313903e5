"""Vision-language families on two ranks against transformers: logits, weights, gradients. One launch for all tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.breadth import selected
from tests.support.distributed import run_distributed
from tests.support.megatron_model import assemble
from tests.support.megatron_references import Reference
from tests.support.vision_families import (
    CASES,
    EXPORTED,
    FAMILIES,
    IMAGE,
    is_tower,
    make_checkpoint,
    per_sample,
    reference,
    samples,
    whole_model,
)

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
    return run_distributed("tests.support.vision_families:some_families", 2, arguments, timeout=300)


@pytest.fixture(scope="module")
def references(checkpoints: dict[str, str]) -> dict[str, Reference]:
    return {name: reference(path, name, samples()) for name, path in checkpoints.items()}


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_logits_equal_transformers(name: str, layout: str, ranks: Any, references: Any) -> None:
    expected = references[name].logits
    seen = assemble([rank[f"{layout}/{name}"]["forward"] for rank in ranks], expected.shape[1], len(expected))
    assert expected.std() > 0.3
    # Delta nets: weights that differ by 1e-7 make 2e-4 in transformers itself.
    torch.testing.assert_close(seen, expected, atol=1e-4 if name.startswith("qwen3_5") else 5e-5, rtol=0)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_weights_round_trip_bit_for_bit(name: str, layout: str, ranks: Any, references: Any) -> None:
    """A tower that is not trained is no part of the model."""
    trained = "trained" in layout
    expected = {n: t for n, t in references[name].weights.items() if trained or not is_tower(n)}
    for rank in ranks:
        seen = dict(rank[f"{layout}/{name}"]["weights"])
        assert seen.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[n]) for n, tensor in seen.items())
        assert rank[f"{layout}/{name}"]["described"]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_gradients_equal_autograd(name: str, layout: str, ranks: Any, references: Any) -> None:
    trained = "trained" in layout
    expected = {n: g for n, g in references[name].gradients.items() if trained or not is_tower(n)}
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for rank in ranks:
        seen = dict(rank[f"{layout}/{name}"]["gradients"])
        assert seen.keys() == expected.keys()
        for parameter, gradient in seen.items():
            error = (gradient - expected[parameter]).norm()
            assert error < 2e-5 * expected[parameter].norm() + 1e-7 * total, (parameter, error)
        norm = torch.stack([gradient.norm() for gradient in seen.values()]).norm()
        torch.testing.assert_close(norm, total, rtol=1e-5, atol=0)


@pytest.mark.parametrize("layout", EXPORTED)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_has_every_tensor_of_the_source(
    name: str, layout: str, ranks: Any, references: Any, scratch: Path
) -> None:
    from slime.weights.hf.checkpoint import HfCheckpoint

    expected = references[name].weights
    with HfCheckpoint(scratch / f"{name}-{layout}") as exported:
        assert exported.names == expected.keys()
        assert all(torch.equal(exported.slice(n)[:], tensor) for n, tensor in expected.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_images_and_their_places_matter(name: str, checkpoints: Any, references: Any) -> None:
    """A comparison would prove nothing if logits did not depend on them."""
    model, pack = whole_model(checkpoints[name]), samples()
    with torch.no_grad():
        other = per_sample(model, pack._replace(pixels=[None if p is None else p.flip(0) for p in pack.pixels]))
        turned = [None if g is None else g[:, [0, 2, 1]] for g in pack.grids]
        sideways = per_sample(model, pack._replace(grids=turned))
    expected = references[name].logits.split([len(tokens) for tokens in pack.tokens])
    for changed in (other, sideways):
        assert (changed[0] - expected[0]).abs().max() > 1e-2
        assert torch.equal(changed[1], expected[1])  # the sample without images
    start = int((pack.tokens[0] == IMAGE).nonzero()[0])
    torch.testing.assert_close(other[0][:start], expected[0][:start])


SHARED = ("qwen3_vl", "qwen2_5_vl")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("shared")
    checkpoints = {name: make_checkpoint(folder, name) for name in SHARED}
    return run_distributed("tests.support.vision_families:shared", 1, {"checkpoints": checkpoints})[0]


@pytest.mark.parametrize("name", SHARED)
def test_equal_images_are_computed_once(name: str, shared: dict[str, dict[str, Any]]) -> None:
    """Of 24 + 24 + 2 x 24 + 16 patches those of three images, in both micro-batches; the tower's gradients are those of
    all uses."""
    plain, once = shared[f"all/{name}"], shared[f"distinct/{name}"]
    assert (plain["patches"], once["patches"]) == ([112, 112], [64, 64])
    torch.testing.assert_close(once["logits"], plain["logits"], atol=5e-5, rtol=0)
    assert once["gradients"].keys() == plain["gradients"].keys()
    total = torch.stack([gradient.norm() for gradient in plain["gradients"].values()]).norm()
    for parameter, gradient in plain["gradients"].items():
        error = (once["gradients"][parameter] - gradient).norm()
        assert error < 2e-5 * gradient.norm() + 1e-7 * total, parameter


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("refused"), "qwen3_vl")
    return run_distributed("tests.support.vision_families:refused", 1, {"checkpoint": checkpoint})[0]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("one image too few", "16 image tokens, but the 2 images have 12 features"),
        ("text within an image", "the 6 image tokens of an image of [1, 4, 6] patches are not one run of them"),
        ("no images", "16 image tokens, but the 0 images have 0 features"),
        ("no pixels", "there are 3 images, but no pixel_values"),
    ],
)
def test_image_tokens_that_are_not_those_of_the_images(what: str, message: str, refusals: dict[str, str]) -> None:
    assert message in refusals[what]
