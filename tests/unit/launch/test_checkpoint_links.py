from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.launch.command_utils import make_loadable
from tools import convert_hf_to_torch_dist, fp8_cast_bf16


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    directory = tmp_path / "fp8"
    directory.mkdir()
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 2]}}
    (directory / "config.json").write_text(json.dumps(config))
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(torch.float8_e4m3fn)
    save_file({"w": weight, "w_scale_inv": torch.tensor([[2.0]])}, directory / "model.safetensors")
    return directory


def test_a_checkpoint_is_linked_once(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "below" / "torch_dist"
    make_loadable(source, target)
    make_loadable(source, target)
    assert target.resolve() == source
    other = tmp_path / "empty"
    other.mkdir()
    make_loadable(source, other)
    assert other.is_symlink()


def test_what_is_there_stays(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "full"
    target.mkdir()
    (target / "file").touch()
    with pytest.raises(FileExistsError, match="exists already and is not"):
        make_loadable(source, target)
    assert (target / "file").is_file()
    with pytest.raises(FileNotFoundError, match=r"it has no config\.json"):
        make_loadable(target, tmp_path / "new")


def test_fp8_becomes_bf16(tmp_path: Path, fp8: Path) -> None:
    convert_hf_to_torch_dist.main(["--hf-checkpoint", str(fp8), "--save", str(tmp_path / "a")])
    fp8_cast_bf16.main(["--input-fp8-hf-path", str(fp8), "--output-bf16-hf-path", str(tmp_path / "b")])
    for made in ("a", "b"):
        tensors = load_file(tmp_path / made / "model.safetensors")
        assert tensors.keys() == {"w"}
        assert tensors["w"].tolist() == [[2.0, 4.0], [6.0, 8.0]]
    with pytest.raises(SystemExit, match="exists already"):
        fp8_cast_bf16.main(["--input-fp8-hf-path", str(fp8), "--output-bf16-hf-path", str(tmp_path / "b")])


def test_the_command_takes_the_flags_of_a_model_and_works_once(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "torch_dist"
    words = ["--swiglu", "--num-layers", "2", "--hf-checkpoint", str(source), "--save", str(target)]
    monkeypatch.setenv("RANK", "1")
    convert_hf_to_torch_dist.main(words)
    assert not target.exists()
    monkeypatch.setenv("RANK", "0")
    convert_hf_to_torch_dist.main(words)
    assert target.resolve() == source
    assert "not needed, as config.json describes the model: --swiglu --num-layers 2" in capsys.readouterr().out
