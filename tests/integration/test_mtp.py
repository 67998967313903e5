"""MTP layers: their loss and gradients, what training leaves alone, every family's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import mtp
from tests.support.breadth import few, selected
from tests.support.distributed import run_distributed
from tests.support.float64 import as_float64
from tests.support.layouts import FLOAT64, LAYOUTS, PP2, SP, TP2, Result, assert_equal, measure
from tests.support.model_families import _per_expert
from tests.support.mtp import DEEPSEEK, MIMO, QWEN, Names
from tests.support.mtp_ranks import ON, as_whole, make_family
from tests.support.trainer import make_train_data, tiny_checkpoint

pytestmark = pytest.mark.integration

SCENARIOS: dict[str, dict[str, Any]] = {
    "samples alone": ON,
    "packed": {**ON, "micro_batch_size": 4, "log_probs_chunk_size": 5},
    "per token": {**ON, "calculate_per_token_loss": True, "micro_batch_size": 2},
    "loss recomputed": {**ON, "recompute_loss_function": True, "micro_batch_size": 4},
    "not trained": {},
}
BATCH = 8
STEPS = {"lr": 1e-2, "global_batch_size": 4, "clip_grad": 1e9, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen2 in float64 with two layers of MiMo, as which transformers reads it."""
    folder = tmp_path_factory.mktemp("mtp")
    base = tiny_checkpoint(folder / "base", seed=0, family="qwen2", tie_word_embeddings=False)
    return mtp.add_layers(as_float64(base, folder / "float64"), folder / "predicting", MIMO, 2)


@pytest.fixture(scope="module")
def alone(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    mimo = as_float64(checkpoint, tmp_path_factory.mktemp("alone") / "mimo")
    mtp.as_mimo(mimo)
    arguments = {"checkpoint": mimo, "plain": checkpoint, "scenarios": SCENARIOS, "steps": STEPS}
    found = run_distributed("tests.support.mtp_ranks:one_process", 1, arguments, timeout=300, fresh=True)[0]
    for result in found.values():
        for kind in {"gradients", "weights"} & result.keys():
            result[kind] = {name: torch.from_numpy(array) for name, array in result[kind].items()}
    return found


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "not trained"])
def test_loss_and_gradients_are_those_of_plain_torch(name: str, alone: Any) -> None:
    per_token = bool(SCENARIOS[name].get("calculate_per_token_loss"))
    totals, gradients = alone["plain"][per_token]
    divisor = sum(sum(mask) for mask in make_train_data(seed=3)["loss_masks"]) if per_token else BATCH
    expected = [total / divisor for total in totals]
    step = alone[name]["steps"][0]
    assert step["mtp_1_loss"] == pytest.approx(expected[0], rel=1e-12)
    assert step["mtp_2_loss"] == pytest.approx(expected[1], rel=1e-12)
    assert step["mtp_loss"] == pytest.approx(sum(expected) / 2, rel=1e-12)
    seen = alone[name]["gradients"]
    assert {n for n in seen if "mtp_layers" in n} == gradients.keys()
    for parameter, array in gradients.items():
        plain = torch.from_numpy(array) * ON["mtp_loss_scaling_factor"] / 2 / divisor
        assert (seen[parameter] - plain).norm() <= 1e-10 * plain.norm(), parameter


def test_the_policy_gets_the_gradients_that_it_has_without_the_layers(alone: Any) -> None:
    with_layers, without = alone["samples alone"], alone["not trained"]
    assert "mtp_loss" not in without["steps"][0]
    assert with_layers["steps"][0]["loss"] == without["steps"][0]["loss"]
    assert with_layers["steps"][0]["grad_norm"] > without["steps"][0]["grad_norm"]
    trunk = without["gradients"]
    assert not any("mtp_layers" in name for name in trunk)
    assert all(torch.equal(with_layers["gradients"][name], gradient) for name, gradient in trunk.items())


def test_layers_that_are_not_trained_stay_as_they_are(checkpoint: str, alone: Any) -> None:
    from safetensors.torch import load_file

    source = {n: t for n, t in load_file(Path(checkpoint) / "model.safetensors").items() if "mtp_layers" in n}
    assert len(source) == 2 * 16
    assert not any("mtp_layers" in name for name in alone["carried"]["weights"])
    frozen, trained = alone["frozen"]["weights"], alone["trained"]["weights"]
    assert all(torch.equal(frozen[name], tensor) for name, tensor in source.items())
    assert all(not torch.equal(trained[name], tensor) for name, tensor in source.items())
    for name, tensor in alone["carried"]["weights"].items():
        assert torch.equal(tensor, frozen[name])
        assert torch.equal(tensor, trained[name])


def test_passes_before_the_steps_know_nothing_of_the_layers(alone: Any) -> None:
    for plain, frozen, trained in zip(
        *(alone[mode]["reports"] for mode in ("carried", "frozen", "trained")), strict=True
    ):
        assert plain["rollout"] == frozen["rollout"] == trained["rollout"]
        for before, without, with_loss in zip(plain["steps"], frozen["steps"], trained["steps"], strict=True):
            assert before == without
            added = {"mtp_loss", "mtp_1_loss", "mtp_2_loss"}
            assert with_loss.keys() == before.keys() | added
            assert all(with_loss[key] == value for key, value in before.items() if key != "grad_norm")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("1 layers", ["model.mtp_layers.1.", "no place", "model.safetensors"]),
        ("3 layers", ["model.mtp_layers.2.", "missing"]),
        ("no module", ["--mtp-num-layers 2", "GPTModel", "gpt_model", "--custom-model-provider-path"]),
    ],
)
def test_refusals_name_what_is_wrong(case: str, words: list[str], alone: Any) -> None:
    message = alone["refused"][case]
    assert all(word in message for word in words), message


ON_TWO_RANKS = ["MTP, TP2+SP", "MTP, PP2, packed, overlapped", "MTP, PP2 x VPP2", "MTP, PP2, tied", "MTP, CP2, packed"]


QUICK = ("MTP, packed, recompute full", "MTP, PP2 x VPP2", "MTP, CP2, packed")


@pytest.fixture(scope="module")
def layouts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Result]:
    cases = [("grpo", layout) for layout in selected(request, "layout") if layout.startswith("MTP")]
    return measure(tmp_path_factory.mktemp("layouts"), FLOAT64, cases)


@pytest.mark.parametrize("layout", few(["MTP, packed, recompute full", *ON_TWO_RANKS], QUICK))
def test_layout_does_not_matter(layout: str, layouts: Any) -> None:
    reference = layouts["grpo", LAYOUTS[layout].reference]
    assert_equal(layouts["grpo", layout], reference, FLOAT64)
    assert reference.steps[-1]["mtp_loss"] > 0


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """By rank: an uninterrupted run under PP2, and the runs that resume from its checkpoint under PP2 and TP2+SP."""
    folder = tmp_path_factory.mktemp("resumed")
    base = tiny_checkpoint(folder / "base", seed=0, family="qwen2", tie_word_embeddings=False)
    mimo = mtp.add_layers(base, folder / "mimo", MIMO, 2)
    mtp.as_mimo(mimo)
    layouts = [PP2, {**TP2, **SP}]
    arguments = {"checkpoint": mimo, "save": str(folder / "save"), "layouts": layouts, "first": 1, "more": 1}
    target = "tests.support.trainer_ranks:resume_scenario"
    return run_distributed(target, 2, {**arguments, **ON, "adam_eps": 1e-3}, timeout=300)


def test_a_checkpoint_has_the_layers_and_their_optimizer_state(resumed: Any) -> None:
    uninterrupted, again, elsewhere = resumed[-1]  # the last stage, which has the metrics
    assert any("mtp.layers.1." in name for name in uninterrupted["parameters"])
    assert again["loaded_equal"]
    assert again["steps"] == uninterrupted["steps"]
    assert all(torch.equal(again["parameters"][n], p) for n, p in uninterrupted["parameters"].items())
    assert elsewhere["start"] == 1
    for expected, steps in zip(uninterrupted["steps"], elsewhere["steps"], strict=True):
        for name, value in expected[0].items():
            assert steps[0][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


FAMILIES: dict[str, tuple[str, Names]] = {  # model_type of transformers
    "mimo": ("qwen2", MIMO),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "glm4_moe_lite": ("glm4_moe_lite", DEEPSEEK),
    "glm4_moe": ("glm4_moe", DEEPSEEK),
    "qwen3_next": ("qwen3_next", QWEN),
    "qwen3_5": ("qwen3_5_text", QWEN),
    "qwen3_5_moe": ("qwen3_5_moe_text", QWEN),
}
WHOLE = "qwen3_5_moe-whole"
TWO_RANKS = ["tp2-sp", "pp2", "ep2"]  # context parallelism cuts sequences alike for all: see the layouts above
CASES = [(name, layout) for layout in TWO_RANKS for name in (*FAMILIES, WHOLE)]
DENSE = ("mimo", "qwen3_5")
CASES_OF_RANKS = [case for case in CASES if case[1] != "ep2" or case[0] not in DENSE]
QUICK_CASES = [case for case in CASES_OF_RANKS if case[1] == "pp2"]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("families")
    paths = {name: make_family(folder, name, names) for name, (_, names) in FAMILIES.items()}
    return {**paths, WHOLE: as_whole(paths["qwen3_5_moe"], folder / "whole", "qwen3_5_moe")}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, families: dict[str, str], exports: Path) -> list[dict[str, Any]]:
    layouts = [layout for layout in TWO_RANKS if layout in selected(request, "layout")]
    arguments = {"checkpoints": families, "scratch": str(exports), "layouts": layouts, "dense": DENSE}
    return run_distributed("tests.support.mtp_ranks:families", 2, arguments, timeout=300)


@pytest.mark.parametrize(("name", "layout"), few(CASES_OF_RANKS, QUICK_CASES))
def test_every_weight_round_trips(name: str, layout: str, families: Any, ranks: Any, exports: Path) -> None:
    from safetensors.torch import load_file

    from slime.weights.hf.checkpoint import HfCheckpoint

    source = load_file(Path(families[name]) / "model.safetensors")
    copies = {n for n in source if n.endswith((".shared_head.head.weight", "layers.2.embed_tokens.weight"))}
    assert len(copies) == (2 if FAMILIES.get(name, ("", QWEN))[1].copies else 0)
    for rank in ranks:
        seen = dict(rank[f"{layout}/{name}"]["weights"])
        assert len(seen) == len(rank[f"{layout}/{name}"]["weights"])
        assert seen.keys() == source.keys() - copies
        assert all(torch.equal(tensor, source[n]) for n, tensor in seen.items())
        assert rank[f"{layout}/{name}"]["described"]
    with HfCheckpoint(exports / f"{name}-{layout}") as exported:
        assert exported.names == source.keys()
        assert all(torch.equal(exported.slice(n)[:], tensor) for n, tensor in source.items())


@pytest.fixture(scope="module")
def expected(families: dict[str, str]) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients of every family by transformers."""
    found = {}
    for name, (model_type, names) in FAMILIES.items():
        (total,), parameters = mtp.losses(families[name], model_type, names, 1, make_train_data(prompts=2, seed=5))
        (0.2 * total / 4).backward()
        gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        found[name] = float(total.detach()), _per_expert(gradients, model_type)
    return found


@pytest.mark.parametrize(("name", "layout"), few([case for case in CASES_OF_RANKS if case[0] != WHOLE], QUICK_CASES))
def test_family_learns_what_transformers_would(name: str, layout: str, ranks: Any, expected: Any) -> None:
    loss, gradients = expected[name]
    results = [rank[f"{layout}/{name}"] for rank in ranks]
    losses = [result["loss"] for result in results]
    assert (sum(losses) if layout == "pp2" else losses[0]) == pytest.approx(loss, rel=1e-5)
    total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for result in results:
        seen = {n: g for n, g in result["gradients"] if "e_score_correction_bias" not in n}
        for parameter, gradient in seen.items():
            if parameter in gradients:
                error = (gradient - gradients[parameter]).norm()
                assert error < 2e-5 * gradients[parameter].norm() + 1e-7 * total, parameter
            else:
                assert not gradient.any(), parameter
        assert gradients.keys() <= seen.keys()


def test_an_export_has_the_copies_of_what_was_trained(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from slime.backends.megatron_utils.weights.maps import family_of
    from slime.backends.megatron_utils.weights.untrained import write_copies
    from slime.weights.hf.checkpoint import HfCheckpoint

    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "config.json").write_text('{"num_hidden_layers": 2, "num_nextn_predict_layers": 1}')
    names = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight", "model.layers.2.a.weight")
    save_file({name: torch.zeros(2, 2) for name in names}, source / "model.safetensors")
    new = {"model.embed_tokens.weight": torch.full((2, 2), 3.0), "lm_head.weight": torch.full((2, 2), 4.0)}
    save_file(new, target / "model-1.safetensors")
    written = dict.fromkeys(new, "model-1.safetensors")
    files, size = write_copies(source, target, family_of("glm4_moe"), written)
    assert set(files) == set(names[:2])
    assert size == 32
    (target / "model-1.safetensors").unlink()
    with HfCheckpoint(target) as checkpoint:
        assert checkpoint.slice(names[0])[:].unique().tolist() == [3.0]
        assert checkpoint.slice(names[1])[:].unique().tolist() == [4.0]
