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


def test_whole_files_are_no_finding(found):
    assert found().errors == []
