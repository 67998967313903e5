"""The conversions as commands, by their names here and by those of older scripts."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from slime.backends.megatron_utils.checkpoints.convert import differences
from slime.weights.hf.checkpoint import HfCheckpoint
from tools import convert
from tools.tiny_model import make_tiny_checkpoint

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "qwen3_moe")


def quantization(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((path / "config.json").read_text())["quantization_config"]
    return found


def same(one: Path, other: Path) -> bool:
    with HfCheckpoint(one) as ours, HfCheckpoint(other) as theirs:
        return ours.names == theirs.names and all(
            torch.equal(*(c.tensor(name).flatten().view(torch.uint8) for c in (ours, theirs))) for name in ours.names
        )


def older(tool: str, *words: object) -> None:
    import_module(f"tools.{tool}").main([str(word) for word in words])


def test_fp8_and_back(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert.main(["hf-to-fp8", str(model), str(tmp_path / "fp8")])
    assert quantization(tmp_path / "fp8")["weight_block_size"] == [128, 128]
    older("convert_hf_to_fp8", "--model-dir", model, "--save-dir", tmp_path / "older", "--block-size", 128, 128)
    assert same(tmp_path / "fp8", tmp_path / "older")
    convert.main(["to-bf16", str(tmp_path / "fp8"), str(tmp_path / "bf16")])
    older("fp8_cast_bf16", "--input-fp8-hf-path", tmp_path / "older", "--output-bf16-hf-path", tmp_path / "cast")
    assert same(tmp_path / "bf16", tmp_path / "cast")
    convert.main(["hf-to-fp8", str(model), str(tmp_path / "fp8"), "--strategy", "channel", "-f"])
    assert quantization(tmp_path / "fp8")["format"] == "float-quantized"
    for flags in ("--strategy tensor --block-size 1 1", "--strategy channel --scale-fmt ue8m0"):
        with pytest.raises(SystemExit, match="--strategy block"):
            convert.main(["hf-to-fp8", str(model), str(tmp_path / "no"), *flags.split()])
    assert f"wrote {tmp_path / 'bf16'}" in capsys.readouterr().out


def test_int4_and_back(model: Path, tmp_path: Path) -> None:
    convert.main(["hf-to-int4", str(model), str(tmp_path / "int4")])
    older("convert_hf_to_int4_direct", "--model-dir", model, "--save-dir", tmp_path / "older", "--is-symmetric")
    assert same(tmp_path / "int4", tmp_path / "older")
    convert.main(["to-bf16", str(tmp_path / "int4"), str(tmp_path / "bf16")])
    older("convert_k2_thinking_int4_to_bf16", "--model-dir", tmp_path / "older")
    assert same(tmp_path / "bf16", tmp_path / "older_bf16")
    with pytest.raises(SystemExit, match="exists already"):
        older("convert_k2_thinking_int4_to_bf16", "--model-dir", tmp_path / "older")
    older("convert_k2_thinking_int4_to_bf16", "--model-dir", tmp_path / "older", "--overwrite")
    convert.main(["hf-to-int4", str(model), str(tmp_path / "zero"), "--asymmetric", "--ignore-rules", "re:.*lm_head"])
    with HfCheckpoint(tmp_path / "zero") as checkpoint:
        assert "model.layers.0.self_attn.q_proj.weight_zero_point" in checkpoint.names


def test_int4_by_gptq_asks_for_what_it_needs(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("convert_hf_to_int4", "--input-dir", model, "--output-dir", tmp_path / "out", "--data-dir", "/nowhere")
    with pytest.raises(SystemExit, match="W8A16 is not available"):
        older(*given, "--quant-type", "W8A16")
    with pytest.raises(SystemExit, match=r"cannot be stored in INT4: .* group size 48"):
        older(*given, "--quant-group-size", 48)
    monkeypatch.setitem(sys.modules, "llmcompressor", None)
    with pytest.raises(SystemExit, match=r"package llmcompressor, which cannot be imported .* pip install"):
        older(*given)
    monkeypatch.setitem(sys.modules, "llmcompressor", ModuleType("llmcompressor"))
    with pytest.raises(SystemExit, match=r"/nowhere/train-00000-of-00001.parquet does not exist"):
        older(*given)
    assert list(tmp_path.iterdir()) == []


def test_a_quantized_checkpoint_becomes_megatron_s_and_is_exported_in_bf16(model: Path, tmp_path: Path) -> None:
    int4, megatron, back = (str(tmp_path / name) for name in ("int4", "megatron", "back"))
    convert.main(["hf-to-int4", str(model), int4])
    convert.main(["to-bf16", int4, str(tmp_path / "bf16")])
    for _ in range(2):
        convert.main(["hf-to-torch-dist", int4, megatron, "--force"])
    convert.main(["torch-dist-to-hf", megatron, back, "--origin-hf-dir", int4])
    assert differences(tmp_path / "back", tmp_path / "bf16") == []
