from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime.weights.hf.checkpoint import INDEX, HfCheckpoint, read_config

TENSORS = {"a": torch.arange(6.0).reshape(3, 2), "b": torch.ones(4)}


def test_one_file_without_an_index(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with HfCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.names == {"a", "b"}
        assert checkpoint.slice("a").get_shape() == [3, 2]
        assert torch.equal(checkpoint.slice("a")[1:], TENSORS["a"][1:])
        assert checkpoint.file_of("b").name == "model.safetensors"


def test_shards_by_the_index(tmp_path: Path) -> None:
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    save_file({"stale": torch.ones(1)}, tmp_path / "stale.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in TENSORS}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with HfCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.names == {"a", "b"}
        assert torch.equal(checkpoint.slice("b")[:], TENSORS["b"])


def test_an_index_that_names_a_missing_file(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"not there: model-00001-of-00001\.safetensors"):
        HfCheckpoint(tmp_path)


def test_the_same_tensor_in_two_files(tmp_path: Path) -> None:
    for file in ("x", "y"):
        save_file(TENSORS, tmp_path / f"{file}.safetensors")
    with pytest.raises(ValueError, match=r"x\.safetensors and .*y\.safetensors"):
        HfCheckpoint(tmp_path)


def test_no_safetensors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="found none"):
        HfCheckpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"only pytorch_model\.bin; convert"):
        HfCheckpoint(tmp_path)


def test_config(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a Hugging Face checkpoint"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_config(tmp_path) == {"model_type": "llama"}


@pytest.mark.parametrize("size", [0, 5, 60, 200])
def test_a_file_that_is_cut_off_is_named(size, tmp_path):

    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"model\.safetensors \({size} bytes\) is no whole safetensors file"):
        HfCheckpoint(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    with pytest.raises(ValueError, match=r"model\.safetensors .* is no whole safetensors file"):
        HfCheckpoint(tmp_path).slice("a")


def test_a_damaged_index_is_named(tmp_path):
    (tmp_path / INDEX).write_text('{"weight_map": ')
    with pytest.raises(ValueError, match=r"index\.json is no JSON file"):
        HfCheckpoint(tmp_path)
