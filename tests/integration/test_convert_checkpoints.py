"""Checkpoints that trainers write under several layouts become the Hugging Face checkpoints that they began with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils.weights.convert import Conversion, convert, differences
from tests.support.distributed import run_distributed
from tests.support.model_families import make_checkpoint
from tests.support.mtp import DEEPSEEK, QWEN
from tests.support.mtp_ranks import make_family

CASES = {  # dense with a fused MLP; latent attention and experts; stacked experts of a whole model; linear attention
    "glm4": ("tp2", "pp2"),
    "deepseek_v3": ("pp2", "ep2"),
    "qwen3_5_moe-whole": ("ep2",),
    "qwen3_next": ("pp2",),
    "glm4_moe-predicting": ("pp2",),  # with an MTP layer, numbered on after the last one, that repeats the embedding
    "qwen3_next-predicting": ("ep2",),
}
MTP = {"glm4_moe-predicting": DEEPSEEK, "qwen3_next-predicting": QWEN}


ROOT = Path(__file__).resolve().parents[2]


def is_command(path: Path) -> bool:
    return "if not __package__:" in path.read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convert")
    checkpoints = {name: make_checkpoint(folder, name) for name in CASES if name not in MTP}
    checkpoints |= {name: make_family(folder, name.removesuffix("-predicting"), names) for name, names in MTP.items()}
    run_distributed(
        "tests.support.convert_ranks:save_all", 2, {"checkpoints": checkpoints, "cases": CASES}, timeout=300
    )
    return folder


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name, layouts in CASES.items() for layout in layouts])
def test_a_trainer_s_checkpoint_becomes_the_original(folder: Path, tmp_path: Path, name: str, layout: str) -> None:
    origin, saved = folder / name, folder / f"{name}-{layout}"
    lacks_some = name not in (*MTP, "glm4")  # a vision tower, or MTP layers that were not built
    made = convert(Conversion(saved, tmp_path / "made", origin, add_missing=lacks_some, chunk_bytes=50_000))
    assert differences(made, origin) == []


def test_a_changed_weight_is_what_differs(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    made = convert(Conversion(folder / "glm4-tp2", tmp_path / "made", folder / "glm4"))
    file = next(made.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + torch.tensor([0.5] + [0.0] * 63)
    save_file(tensors, file, metadata={"format": "pt"})
    assert differences(made, folder / "glm4") == ["model.norm.weight differs by up to 0.5"]


@pytest.mark.parametrize("tool", [path.name for path in sorted((ROOT / "tools").glob("*.py")) if is_command(path)])
def test_every_command_runs_by_its_path_from_elsewhere(tool: str) -> None:
    """With nothing on PYTHONPATH: a module beside the command must not hide a package either."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "tools" / tool), "--help"]
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout
