"""Checkpoints that trainers write under several layouts become the Hugging Face checkpoints that they began with."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.checkpoints.convert import Conversion, convert, differences
from slime.backends.megatron_utils.checkpoints.to_torch_dist import to_torch_dist
from slime.backends.megatron_utils.weights.maps import family_of
from slime.backends.megatron_utils.weights.untrained import carried_names
from slime.weights.hf.checkpoint import HfCheckpoint, read_config
from tests.support.breadth import few, selected
from tests.support.distributed import run_distributed
from tests.support.model_families import make_checkpoint
from tests.support.mtp import DEEPSEEK, QWEN
from tests.support.mtp_ranks import make_family
from tests.unit.backends.megatron_utils.test_convert import megatron_tensors, write_torch_dist
from tools.tiny_model import make_tiny_checkpoint

CASES = {  # dense with a fused MLP; latent attention and experts; stacked experts of a whole model; linear attention
    "glm4": ("tp2", "pp2"),
    "deepseek_v3": ("pp2", "ep2"),
    "qwen3_5_moe-whole": ("ep2",),
    "glm5.2": ("pp2",),  # layers with and without an indexer
    "qwen3_next": ("pp2", "tp2-sp"),
    "gemma4-whole": ("pp2", "tp2-sp"),  # layers with other heads, a number that is not trained
    "gemma4_moe": ("ep2",),  # an MLP that is a shared expert
    "gpt_oss": ("tp2-sp", "ep2"),  # biases, whole and cut, and sinks
    "qwen3_5": ("tp2", "pp2"),  # the same without experts
    "glm4_moe-predicting": ("pp2",),  # with an MTP layer, numbered on after the last one, that repeats the embedding
    "qwen3_next-predicting": ("ep2",),
}
EVERY_CASE = [(name, layout) for name, layouts in CASES.items() for layout in layouts]
QUICK = [("glm4", "tp2"), ("qwen3_5", "tp2"), ("qwen3_5_moe-whole", "ep2"), ("glm4_moe-predicting", "pp2")]
MTP = {"glm4_moe-predicting": DEEPSEEK, "qwen3_next-predicting": QWEN}


ROOT = Path(__file__).resolve().parents[2]


def is_command(path: Path) -> bool:
    return "if not __package__:" in path.read_text()


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """The layouts by checkpoint that this session tests; the first is always among them."""
    found: dict[str, list[str]] = {"glm4": ["tp2"]}
    for name, layout in selected(request, "name", "layout"):
        if layout not in found.setdefault(name, []):
            found[name].append(layout)
    return found


@pytest.fixture(scope="module")
def checkpoints(cases: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("convert")
    return {
        name: make_family(folder, name.removesuffix("-predicting"), MTP[name])
        if name in MTP
        else make_checkpoint(folder, name)
        for name in cases
    }


@pytest.fixture(scope="module")
def folder(checkpoints: dict[str, str], cases: dict[str, list[str]]) -> Path:
    run_distributed(
        "tests.support.convert_ranks:save_all", 2, {"checkpoints": checkpoints, "cases": cases}, timeout=300
    )
    return Path(checkpoints["glm4"]).parent


@pytest.fixture(scope="module")
def loaded(checkpoints: dict[str, str], cases: dict[str, list[str]]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights that trainers have after loading the converted Hugging Face checkpoints."""
    for path in checkpoints.values():
        to_torch_dist(Path(path), Path(f"{path}-torch_dist"))
    arguments = {"checkpoints": checkpoints, "cases": cases}
    ranks: list[dict[str, dict[str, torch.Tensor]]] = run_distributed(
        "tests.support.convert_ranks:load_all", 2, arguments, timeout=300
    )
    return {case: {**ranks[0][case], **ranks[1][case]} for case in ranks[0]}


@pytest.mark.parametrize(("name", "layout"), few(EVERY_CASE, QUICK))
def test_a_trainer_s_checkpoint_becomes_the_original(
    folder: Path, tmp_path: Path, name: str, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    origin, saved = folder / name, folder / f"{name}-{layout}"
    lacks_some = name not in (*MTP, "glm4", "qwen3_5", "gpt_oss")  # a vision tower, or MTP layers that were not built
    made = convert(Conversion(saved, tmp_path / "made", origin, add_missing=lacks_some, chunk_bytes=50_000))
    assert differences(made, origin) == []
    assert "left out" not in caplog.text


@pytest.mark.parametrize(("name", "layout"), few(EVERY_CASE, QUICK))
def test_a_trainer_loads_what_was_converted(
    checkpoints: dict[str, str], loaded: dict[str, dict[str, torch.Tensor]], name: str, layout: str
) -> None:
    family = family_of(read_config(checkpoints[name])["model_type"])
    found = loaded[f"{name}-{layout}"]
    with HfCheckpoint(checkpoints[name]) as checkpoint:
        built = checkpoint.names if name in MTP else checkpoint.names - carried_names(checkpoint, family)
        wanted = {n: checkpoint.tensor(n) for n in built if not (name in MTP and family.copy_of(n))}
    assert found.keys() == wanted.keys()
    assert [n for n, weight in wanted.items() if not torch.equal(found[n], weight)] == []


def test_a_trainer_starts_from_what_was_converted(tmp_path: Path) -> None:
    """With bf16 weights, as published ones are."""
    from safetensors.torch import load_file, save_file

    written, other = (make_tiny_checkpoint(tmp_path / f"model{seed}", "qwen3_moe", seed=seed) for seed in (0, 1))
    file = written / "model.safetensors"
    weights = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    to_torch_dist(written, tmp_path / "root")
    arguments = {"checkpoint": str(other), "root": str(tmp_path / "root")}
    refused, first, found = run_distributed("tests.support.convert_ranks:start", 1, arguments)[0]
    assert "has no optimizer state" in refused
    assert "--no-load-optim" in refused
    assert first == 0
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight.to(found[name].dtype)) for name, weight in weights.items())


def test_a_changed_weight_is_what_differs(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    made = convert(Conversion(folder / "glm4-tp2", tmp_path / "made", folder / "glm4"))
    file = next(made.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + torch.tensor([0.5] + [0.0] * 63)
    save_file(tensors, file, metadata={"format": "pt"})
    assert differences(made, folder / "glm4") == ["model.norm.weight differs by up to 0.5"]


def test_a_trainer_loads_what_older_releases_wrote(tmp_path: Path) -> None:
    """Written without Megatron: TransformerEngine's names and states, layers numbered, as with experts."""
    written, other = (make_tiny_checkpoint(tmp_path / f"model{seed}", "qwen3_moe", seed=seed) for seed in (0, 1))
    with HfCheckpoint(written) as checkpoint:
        weights = {name: checkpoint.tensor(name) for name in checkpoint.names}
    stored = megatron_tensors(weights, heads=4, groups=2, experts=4, rows=len(weights["lm_head.weight"]))
    layers = "decoder.layers."
    by_layer: dict[str, Any] = {name: tensor for name, tensor in stored.items() if not name.startswith(layers)}
    for name, stacked in ((name, tensor) for name, tensor in stored.items() if name.startswith(layers)):
        by_layer |= {f"{layers}{i}.{name.removeprefix(layers)}": tensor for i, tensor in enumerate(stacked)}
    for i, part in itertools.product(range(2), ("self_attention.linear_proj", "self_attention.linear_qkv")):
        by_layer[f"{layers}{i}.{part}._extra_state/shard_0_1"] = [None]
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in by_layer
    write_torch_dist(tmp_path / "save" / "iter_0000007", by_layer)
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("7")
    arguments = {"checkpoint": str(other), "root": str(tmp_path / "save")}
    loaded = run_distributed("tests.support.convert_ranks:load", 1, arguments)[0]
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("tool", [path.name for path in sorted((ROOT / "tools").glob("*.py")) if is_command(path)])
def test_every_command_runs_by_its_path_from_elsewhere(tool: str) -> None:
    """With nothing on PYTHONPATH: a module beside the command must not hide a package either."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "tools" / tool), "--help"]
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout
