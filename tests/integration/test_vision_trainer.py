"""Training on images: the trainer against transformers and autograd, saved and resumed, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import plain_grpo
from tests.support.breadth import selected
from tests.support.distributed import run_distributed
from tests.support.trainer import tiny_checkpoint, trainer_args
from tests.support.vision_families import is_tower, make_checkpoint, whole_model
from tests.support.vision_ranks import WithImages, image_train_data

pytestmark = pytest.mark.integration

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TWO_STEPS = {"lr": 0.002, "global_batch_size": 4, "entropy_coef": 0.01, "use_rollout_entropy": True}
PACKED = {"micro_batch_size": 2}
FORBIDDEN = {"multimodal_keys": {"image": "images"}, "use_tis": True}
"""Prompts have images: no placeholder is sampled, and log-probs are those of the other tokens."""
SCENARIOS: dict[str, dict[str, Any]] = {
    "DP2": TWO_STEPS,
    "DP2, tower trained, overlapped": {**TWO_STEPS, "train_vision_tower": True, "overlap_grad_reduce": True},
    "TP2+SP, packed": {**TWO_STEPS, **PACKED, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2, tower trained, recomputed": {
        **TWO_STEPS, **FULL, "pipeline_model_parallel_size": 2, "train_vision_tower": True,
    },
    "PP2 x VPP2": {
        **TWO_STEPS, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
        "overlap_p2p_comm": True,
    },
    "PP2, no placeholders": {**TWO_STEPS, "pipeline_model_parallel_size": 2, **FORBIDDEN},
    "TP2+SP, no placeholders": {**TWO_STEPS, "tensor_model_parallel_size": 2, "sequence_parallel": True, **FORBIDDEN},
    "CP2, packed, tower trained": {**TWO_STEPS, **PACKED, "context_parallel_size": 2, "train_vision_tower": True},
}  # fmt: skip
NAME = "qwen3_vl"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model of which two layers, the first stage of two by two, take features of the tower's inner layers."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), NAME, num_hidden_layers=8)


@pytest.fixture(scope="module")
def trained(checkpoint: str, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return every rank's reports by scenario."""
    names = selected(request, "name")
    arguments = {"checkpoint": checkpoint, "scenarios": [SCENARIOS[name] for name in names]}
    ranks = run_distributed("tests.support.vision_ranks:trained", 2, arguments, timeout=300)
    return [dict(zip(names, reports, strict=True)) for reports in ranks]


@pytest.fixture(scope="module")
def expected(checkpoint: str, request: pytest.FixtureRequest) -> dict[tuple[bool, bool], list[dict[str, Any]]]:
    """Return the steps of a plain implementation by what it does: see ``kind``."""
    found = {}
    for trains_tower, forbids in dict.fromkeys(map(kind, selected(request, "name"))):
        data = image_train_data()
        model = WithImages(whole_model(checkpoint), data, trains_tower=trains_tower, forbids=forbids)
        args = trainer_args(checkpoint, **TWO_STEPS, **(FORBIDDEN if forbids else {}))
        found[trains_tower, forbids] = plain_grpo.train(args, model, None, data)
    return found


def kind(name: str) -> tuple[bool, bool]:
    """Return whether a scenario trains the tower, and whether it forbids placeholders."""
    return SCENARIOS[name].get("train_vision_tower", False), "multimodal_keys" in SCENARIOS[name]


@pytest.mark.parametrize("name", SCENARIOS)
def test_same_loss_and_gradients(name: str, trained: Any, expected: Any) -> None:
    """Of two steps of two prompts with different images, one of them without."""
    plain = expected[kind(name)]
    last = [rank[name] for rank in trained if "loss" in rank[name]["steps"][0]]
    for rank in last:
        assert len(rank["steps"]) == len(plain) == 2
        for step, wanted in zip(rank["steps"], plain, strict=True):
            for metric, value in wanted["metrics"].items():
                assert step[metric] == pytest.approx(value, rel=1e-4, abs=1e-6), metric
            assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    wanted, whole = plain[-1]["grads"], plain[-1]["grad_norm"]
    for rank in trained:
        seen = rank[name]["gradients"]
        assert seen.keys() == wanted.keys()
        for tensor, gradient in wanted.items():
            difference = (seen[tensor] - gradient).norm().item()
            assert difference <= 4e-5 * max(gradient.norm().item(), 1e-2 * whole), tensor


@pytest.fixture(scope="module")
def resumed(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    layouts = [
        {"pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ]
    arguments = {"checkpoint": checkpoint, "save": str(tmp_path_factory.mktemp("save")), "layouts": layouts}
    return run_distributed("tests.support.vision_ranks:saved", 2, arguments, timeout=300)[0]


def test_training_changes_every_weight_of_the_tower(resumed: list[dict[str, Any]]) -> None:
    before, after = resumed[0]["before"], resumed[0]["weights"]
    assert len([name for name in before if is_tower(name)]) > 40
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_a_run_with_a_trained_tower_continues_from_its_checkpoint(resumed: list[dict[str, Any]]) -> None:
    """Under the layout that it was saved under, and under another one."""
    uninterrupted, *others, _ = resumed
    assert len(others) == 2
    for other in others:
        assert other["loaded"].keys() == uninterrupted["loaded"].keys()
        assert all(torch.equal(other["loaded"][name], tensor) for name, tensor in uninterrupted["loaded"].items())
        for name, tensor in uninterrupted["weights"].items():
            torch.testing.assert_close(other["weights"][name], tensor, atol=2e-5, rtol=1e-4)
        for seen, wanted in zip(other["steps"], uninterrupted["steps"], strict=True):
            assert seen["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)


def test_a_run_that_freezes_the_tower_refuses_the_checkpoint_of_one_that_trains_it(resumed: Any) -> None:
    assert "has a trained vision tower, and this run would take that of --hf-checkpoint" in resumed[-1]["frozen"]


@pytest.fixture(scope="module")
def without_tower(
    checkpoint: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Return the weights of two checkpoints of other values, and what runs make of them."""
    from safetensors.torch import load_file

    from slime.backends.megatron_utils.checkpoints.to_torch_dist import to_torch_dist

    folder = tmp_path_factory.mktemp("without")
    other = make_checkpoint(folder, NAME, seed=5, num_hidden_layers=8)
    to_torch_dist(Path(checkpoint), folder / "converted")
    arguments = {
        "checkpoint": checkpoint, "other": other, "converted": str(folder / "converted"), "save": str(folder / "save"),
    }  # fmt: skip
    (found,) = run_distributed("tests.support.vision_ranks:without_tower", 1, arguments)
    first, second = (load_file(Path(path) / "model.safetensors") for path in (checkpoint, other))
    return first, second, found


@pytest.mark.parametrize("kind", ["converted", "saved"])
def test_a_checkpoint_without_a_tower_is_trained_with_that_of_hf_checkpoint(kind: str, without_tower: Any) -> None:
    first, second, found = without_tower
    expected = {name: second[name] if is_tower(name) else tensor for name, tensor in first.items()}
    assert found[kind].keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[kind][name], expected[name])] == []
    bare = found["converted, frozen"]
    assert bare.keys() == {name for name in first if not is_tower(name)}
    assert all(torch.equal(tensor, first[name]) for name, tensor in bare.items())


def test_a_run_that_begins_to_train_its_tower_continues_without_optimizer_state(without_tower: Any) -> None:
    _, _, found = without_tower
    assert "has no vision tower, and no optimizer state of one" in found["refused"]
    assert "--no-load-optim" in found["refused"]
    assert found["next rollout"] == 1
    tower = [name for name in found["saved"] if is_tower(name)]
    assert [name for name in tower if torch.equal(found["saved"][name], found["trained"][name])] == []


def test_in_bf16_the_frequencies_of_a_tower_stay_exact(checkpoint: str) -> None:
    (found,) = run_distributed("tests.support.vision_ranks:in_bf16", 1, {"checkpoint": checkpoint})
    for kind in ("frozen", "trained"):
        assert found[kind]["weights"] == {torch.bfloat16}
        assert torch.equal(found[kind]["frequencies"], 10000.0 ** -(torch.arange(4) / 4))
        assert found[kind]["logits"].isfinite().all()
    torch.testing.assert_close(found["frozen"]["logits"], found["trained"]["logits"], atol=0, rtol=0)


def test_a_frozen_tower_is_offloaded_with_the_model(checkpoint: str) -> None:
    (found,) = run_distributed("tests.support.vision_ranks:offloaded", 1, {"checkpoint": checkpoint})
    assert found["tensors"] > 40
    assert (found["left"], found["same"]) == (0, True)


@pytest.fixture(scope="module")
def refusals(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    text = tiny_checkpoint(tmp_path_factory.mktemp("text") / "qwen3", seed=0)
    arguments = {"checkpoint": checkpoint, "text_checkpoint": text}
    return run_distributed("tests.support.vision_ranks:refused", 1, arguments)[0]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("sampled", "sample index=105 (position 5): 10 image tokens, but the 3 images have 9 features"),
        ("video", "sample index=105 (position 5) has multimodal_train_inputs pixel_values_videos, which no model"),
        ("fewer pixels", "sample index=105 (position 5): 35 rows of pixel_values, but its images have 36 patches"),
        ("no images", "sample index=105 (position 5): 9 image tokens, but the 0 images have 0 features"),
        ("a language model", "the samples have images, and --spec (absent) builds a model without a vision tower"),
    ],
)
def test_a_sample_whose_images_are_wrong_is_named(what: str, message: str, refusals: dict[str, str]) -> None:
    assert message in refusals[what]
