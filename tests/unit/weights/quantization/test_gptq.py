"""INT4 by GPTQ: where llmcompressor is installed, and with a stand-in for it, what is written and what is continued."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from slime.weights.hf import writer as hf_writer
from slime.weights.hf.checkpoint import HfCheckpoint
from slime.weights.quantization import Int4, Quantizer, gptq
from slime.weights.quantization.files import ONLY_EXPERTS, Chosen, quantize_checkpoint, to_bf16
from slime.weights.quantization.gptq import Calibration, gptq_checkpoint, windows
from tests.unit.weights.quantization.test_files import split, tensors_of
from tools.tiny_model import make_tiny_checkpoint

FORM = Int4(32)
LINE = "the quick brown fox jumps over the lazy dog while twelve grey owls watch from a cold tall tree"


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe", tie_word_embeddings=False)
    split(path, 3)
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    words = LINE.split()
    lines = [" ".join(words[(i * j) % len(words)] for j in range(1, 30)) for i in range(1, 30)]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return Calibration(str(file), samples=24, length=48)


def rounding_up(weights: Chosen, target: Path, form: Int4, calibration: Calibration) -> None:
    """Do as ``calibrate`` does, with recognizable numbers, and sizes as compressed-tensors writes them.

    Half of the experts are not built, and one weight is that was not asked for.
    """
    target.mkdir()
    with HfCheckpoint(weights.source) as checkpoint:
        made = {"model.norm.weight": torch.zeros(3)}
        for name in (n for n in weights.names if ".experts.0." in n or ".experts.1." in n):
            parts = form.quantize(checkpoint.tensor(name) * 1.5)
            made |= {name + suffix: part.long() if suffix == "_shape" else part for suffix, part in parts.items()}
    save_file(made, target / "model.safetensors")


def test_it_is_written_from_what_was_calibrated(
    moe: Path, texts: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "llmcompressor", ModuleType("llmcompressor"))
    monkeypatch.setattr(gptq, "calibrate", rounding_up)
    gptq_checkpoint(moe, tmp_path / "out", FORM, ONLY_EXPERTS, texts)
    weights, written = tensors_of(moe), tensors_of(tmp_path / "out")
    experts = {n for n in weights if ".experts.0." in n or ".experts.1." in n}
    expected = {n: weight for n, weight in weights.items() if n not in experts}
    for n in experts:
        expected |= {n + suffix: part for suffix, part in FORM.quantize(weights[n] * 1.5).items()}
    assert written.keys() == expected.keys()
    assert all(written[n].dtype == expected[n].dtype and torch.equal(written[n], expected[n]) for n in expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.experts.2.up_proj" in config["ignore"]
    assert "model.layers.0.mlp.experts.1.up_proj" not in config["ignore"]
    assert "12 weights that transformers does not build stay as they are" in capsys.readouterr().err
    assert {p.name for p in (tmp_path / "out").glob("*.safetensors")} == {p.name for p in moe.glob("*.safetensors")}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_was_killed_continues(
    moe: Path, texts: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In calibration it begins again, in writing it continues; with other texts it calibrates again."""
    calibrations, kills = [], ["in calibration", "in writing"]
    write = hf_writer.write_tensors

    def calibrate(weights: Chosen, target: Path, form: Int4, calibration: Calibration) -> None:
        calibrations.append(calibration)
        rounding_up(weights, target, form, calibration)
        if kills == ["in calibration", "in writing"]:
            kills.pop(0)
            raise KeyboardInterrupt

    def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        if kills and "00003" in path.name:
            kills.pop()
            raise KeyboardInterrupt
        write(path, tensors)

    monkeypatch.setitem(sys.modules, "llmcompressor", ModuleType("llmcompressor"))
    monkeypatch.setattr(gptq, "calibrate", calibrate)
    monkeypatch.setattr(hf_writer, "write_tensors", write_tensors)
    for number_of_calibrations in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            gptq_checkpoint(moe, tmp_path / "out", FORM, ONLY_EXPERTS, texts)
        assert len(calibrations) == number_of_calibrations
        assert not (tmp_path / "out").exists()
    gptq_checkpoint(moe, tmp_path / "out", FORM, ONLY_EXPERTS, texts)
    assert len(calibrations) == 2
    assert len(tensors_of(tmp_path / "out")) == len(tensors_of(moe)) + 2 * 12
    other = Calibration(texts.data, samples=1, length=8)
    with pytest.raises(FileExistsError):
        gptq_checkpoint(moe, tmp_path / "out", FORM, ONLY_EXPERTS, other)
    gptq_checkpoint(moe, tmp_path / "out", FORM, ONLY_EXPERTS, other, force=True)
    assert calibrations[2:] == [other]


def test_windows_are_of_the_joined_texts(tmp_path: Path) -> None:
    class Letters:
        def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
            assert not add_special_tokens
            return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "abcd"}\n{"other": 1}\n{"text": "efghij"}\n')
    found = windows(Letters(), Calibration(str(file), samples=50, length=4))
    as_text = ["".join(map(chr, row)) for row in found.tolist()]
    assert set(as_text) == {"abcd", "bcde", "cdef", "defg", "efgh", "fghi", "ghij"}
    assert torch.equal(found, windows(Letters(), Calibration(str(file), samples=50, length=4)))
    with pytest.raises(ValueError, match=r"has 10 tokens in its column 'text', and one sample has 11"):
        windows(Letters(), Calibration(str(file), length=11))
    file.write_text('{"other": 1}\n')
    with pytest.raises(ValueError, match="has 0 tokens"):
        windows(Letters(), Calibration(str(file)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_llmcompressor_rounds_better_than_to_nearest(family: str, texts: Calibration, tmp_path: Path) -> None:
    """Outputs on the texts are nearer to those of the model."""
    pytest.importorskip("llmcompressor")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = make_tiny_checkpoint(tmp_path / "model", family, tie_word_embeddings=False, dtype="bfloat16")
    rules = ONLY_EXPERTS if family == "qwen3_moe" else ("re:.*lm_head.*",)
    quantize_checkpoint(source, tmp_path / "nearest", FORM, rules)
    gptq_checkpoint(source, tmp_path / "gptq", FORM, rules, texts)
    nearest, by_gptq = tensors_of(tmp_path / "nearest"), tensors_of(tmp_path / "gptq")
    assert {n: (t.shape, t.dtype) for n, t in nearest.items()} == {n: (t.shape, t.dtype) for n, t in by_gptq.items()}
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("nearest", "gptq")]
    assert configs[0] == configs[1]
    assert Quantizer.of_checkpoint(tmp_path / "gptq") is not None

    ids = windows(AutoTokenizer.from_pretrained(source), texts)
    outputs = {}
    for name in ("nearest", "gptq"):
        to_bf16(tmp_path / name, tmp_path / f"{name}-bf16")
    for name in ("model", "nearest-bf16", "gptq-bf16"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        with torch.no_grad():
            outputs[name] = model(ids).logits
    errors = {name: float((logits - outputs["model"]).square().mean()) for name, logits in outputs.items()}
    assert 0 < errors["gptq-bf16"] < 0.8 * errors["nearest-bf16"], errors
