"""Checkpoint files that are cut off are named before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest


@pytest.mark.parametrize("size", [0, 4, 2000, -1])
@pytest.mark.parametrize("flag", ["--hf-checkpoint", "--ref-load"])
def test_a_file_that_is_cut_off_is_named(found, flags, tmp_path, flag, size):
    copy = shutil.copytree(Path(flags[flags.index("--hf-checkpoint") + 1]), tmp_path / "model")
    file = copy / "model.safetensors"
    whole = file.stat().st_size
    file.write_bytes(file.read_bytes()[:size])
    errors = [error for error in found(flag, copy).errors if "safetensors" in error]
    assert len(errors) == 1
    assert f"{flag}: {file} ({size % whole} bytes) is no whole safetensors file" in errors[0]


def test_a_shard_that_is_missing_is_named(found, flags, tmp_path):
    copy = shutil.copytree(Path(flags[flags.index("--hf-checkpoint") + 1]), tmp_path / "model")
    weight_map = {"a": "model.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    [error] = [error for error in found("--hf-checkpoint", copy).errors if "safetensors" in error]
    assert error.startswith(f"--hf-checkpoint: {copy}/model.safetensors.index.json names files that are not there:")
    assert "model-2.safetensors, model-3.safetensors" in error


def copied(flags: list[str], place: Path) -> Path:
    return Path(shutil.copytree(Path(flags[flags.index("--hf-checkpoint") + 1]), place))


@pytest.mark.parametrize(
    ("other", "seen"),
    [
        (None, "it has none: fetch it again"),
        ("pytorch_model.bin", "it has pytorch_model.bin, which is not read: convert it"),
        ("model-Q4_K_M.gguf", "it has model-Q4_K_M.gguf, which is not read"),
        ("consolidated.00.pth", "it has consolidated.00.pth, which is not read"),
    ],
)
def test_a_checkpoint_without_weights_is_refused(found, flags, tmp_path, other, seen):
    copy = copied(flags, tmp_path / "model")
    (copy / "model.safetensors").unlink()
    if other:
        (copy / other).write_bytes(b"weights")
    [error] = found("--hf-checkpoint", copy).errors
    assert error.startswith(f"--hf-checkpoint {copy}: expected weights in *.safetensors files; {seen}")


def test_weights_that_are_not_used_may_be_absent(found, flags, tmp_path):
    """Engines that make weights up, or read another format; a Megatron checkpoint for the trainer."""
    copy = copied(flags, tmp_path / "model")
    (copy / "model.safetensors").unlink()
    assert found("--hf-checkpoint", copy, "--debug-rollout-only", "--sglang-load-format", "dummy").errors == []
    (copy / "pytorch_model.bin").write_bytes(b"weights")
    assert found("--hf-checkpoint", copy, "--debug-rollout-only").errors == []


def test_a_checkpoint_without_tokenizer_files_is_refused(found, flags, tmp_path):
    copy = copied(flags, tmp_path / "model")
    for file in copy.glob("*token*"):
        file.unlink()
    [error] = found("--hf-checkpoint", copy).errors
    assert error.startswith(f"--hf-checkpoint {copy} holds no tokenizer (tokenizer.json")


def test_a_tokenizer_of_another_model_is_named(found, flags, tmp_path):
    copy = copied(flags, tmp_path / "model")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "vocab_size": 200}))
    [warning] = [text for text in found("--hf-checkpoint", copy, "--vocab-size", 200).warnings if "vocab_size" in text]
    assert "config.json a vocab_size of 200: the first prompt with an id of 200 or more ends the run" in warning


def test_whole_files_are_no_finding(found):
    assert found().errors == []


def test_projections_that_the_family_has_not_are_named(found):
    flags = ("--lora-rank", "4", "--lora-target-modules")
    [error] = found(*flags, "q_proj", "qkv_prj").errors
    assert error.startswith(
        "--lora-target-modules qkv_prj: qwen3 has no such layer; it has down_proj, gate_proj, k_proj,"
    )
    assert found(*flags, "q_proj", "o_proj").errors == []
    assert found(*flags, "all-linear").errors == []
