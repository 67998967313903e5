"""FP8 checkpoints in bf16: every element is its FP8 value times the scale of its block."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.launch import command_utils
from slime.weights.quantization import Fp8

FP8 = torch.float8_e4m3fn
SIZES = {"a.weight": (5, 7), "b.weight": (2, 3)}
BLOCK = (2, 3)


@pytest.fixture
def checkpoint(tmp_path):
    """Two files; the scales of ``a`` are in the other one, ``b`` has one scale for all, ``norm`` is not quantized."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(*size, generator=generator).to(FP8) for name, size in SIZES.items()}
    scales = {"a.weight_scale_inv": torch.rand(3, 3, generator=generator), "b.weight_scale_inv": torch.tensor(0.5)}
    norm = {"norm": torch.randn(4, generator=generator), "ids": torch.tensor([1, 2], dtype=torch.int8)}
    source = tmp_path / "fp8"
    source.mkdir()
    save_file({"a.weight": weights["a.weight"], **norm}, source / "model-00001-of-00002.safetensors")
    save_file({"b.weight": weights["b.weight"], **scales}, source / "model-00002-of-00002.safetensors")
    one, two = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    names = {**dict.fromkeys(("a.weight", *norm), one), **dict.fromkeys(("b.weight", *scales), two)}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    quantization = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    config = {"model_type": "tiny", "torch_dtype": "float8", "quantization_config": quantization}
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer.json").write_text("{}")
    return source, {**weights, **scales, **norm}


def test_every_element_is_multiplied_by_its_scale(checkpoint, tmp_path):
    source, tensors = checkpoint
    target = tmp_path / "made" / "bf16"
    command_utils.fp8_cast_bf16(str(source), str(target))
    got = {name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert set(got) == {"a.weight", "b.weight", "norm", "ids"}
    for row in range(5):
        for column in range(7):
            scale = tensors["a.weight_scale_inv"][row // 2, column // 3]
            expected = (tensors["a.weight"][row, column].float() * scale).bfloat16()
            assert got["a.weight"][row, column] == expected
    assert torch.equal(got["b.weight"], (tensors["b.weight"].float() / 2).bfloat16())
    assert torch.equal(got["norm"], tensors["norm"])
    assert torch.equal(got["ids"], tensors["ids"])

    assert json.loads((target / "config.json").read_text()) == {"model_type": "tiny", "torch_dtype": "bfloat16"}
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == (35 + 6) * 2 + 4 * 4 + 2
    assert {name: file[:11] for name, file in index["weight_map"].items()} == {
        "a.weight": "model-00001", "norm": "model-00001", "ids": "model-00001", "b.weight": "model-00002",
    }  # fmt: skip
    assert (target / "tokenizer.json").read_text() == "{}"


def test_what_exists_is_left_and_what_fails_leaves_nothing(checkpoint, tmp_path):
    source, tensors = checkpoint
    command_utils.fp8_cast_bf16("/nowhere", str(tmp_path))
    save_file({"c.weight": tensors["b.weight"]}, source / "model-00003.safetensors")
    (source / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"the FP8 weight c\.weight of .* has no c\.weight_scale_inv"):
        command_utils.fp8_cast_bf16(str(source), str(tmp_path / "bf16"))
    assert [path.name for path in tmp_path.iterdir()] == ["fp8"]


def test_what_is_no_fp8_checkpoint(tmp_path):
    target = str(tmp_path / "bf16")
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        command_utils.fp8_cast_bf16(str(tmp_path), target)
    config = tmp_path / "config.json"
    config.write_text('{"quantization_config": {"quant_method": "awq"}}')
    with pytest.raises(ValueError, match=r"quantization 'awq' is not available: expected fp8"):
        command_utils.fp8_cast_bf16(str(tmp_path), target)
    config.write_text('{"quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(FileNotFoundError, match=r"expected \*\.safetensors files, found none"):
        command_utils.fp8_cast_bf16(str(tmp_path), target)


def test_stacked_weights_and_wrong_scales():
    weight = torch.ones(2, 3, 2).to(FP8)
    scales = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    expected = [[[1, 1], [1, 1], [2, 2]], [[3, 3], [3, 3], [4, 4]]]
    assert Fp8((2, 2), "block").dequantize({"": weight, "_scale_inv": scales}).tolist() == expected
    with pytest.raises(ValueError, match=r"needs scales \(2, 1\), got \(2, 2, 1\)|needs scales \(1, 1\)"):
        Fp8((3, 2), "block").dequantize({"": weight, "_scale_inv": scales})
