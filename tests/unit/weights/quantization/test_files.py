"""Tiny models of several families: quantized, in bf16 again, killed in the middle and continued."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.weights.hf import writer as hf_writer
from slime.weights.hf.checkpoint import HfCheckpoint
from slime.weights.quantization import Format, Fp8, Int4, Quantizer
from slime.weights.quantization.files import ONLY_EXPERTS, quantize_checkpoint, to_bf16
from slime.weights.quantization.quantizer import ignores, read_format, rules_of
from tests.support.model_families import make_checkpoint
from tools.tiny_model import make_tiny_checkpoint

FORMATS: dict[str, Format] = {
    "block": Fp8((128, 128), "block"), "ue8m0": Fp8((32, 16), "block", ue8m0=True), "tensor": Fp8(),
    "channel": Fp8(per="channel"), "int4": Int4(16), "int4-asymmetric": Int4(32, symmetric=False),
}  # fmt: skip


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    with HfCheckpoint(path) as checkpoint:
        return {name: checkpoint.tensor(name) for name in checkpoint.names}


def split(path: Path, count: int) -> None:
    """Deal the tensors of a checkpoint of one file out to ``count`` files."""
    tensors, files = tensors_of(path), {}
    for file in path.glob("*.safetensors"):
        file.unlink()
    for number in range(count):
        part = dict(sorted(tensors.items())[number::count])
        name = hf_writer.shard_name(number + 1, count)
        save_file(part, path / name)
        files.update(dict.fromkeys(part, name))
    hf_writer.write_index(path, files, 0)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe", tie_word_embeddings=False)
    split(path, 3)
    return path


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_is_what_its_quantizer_makes_of_the_weights(moe: Path, tmp_path: Path, name: str) -> None:
    form, made, again = FORMATS[name], tmp_path / "made", tmp_path / "again"
    rules = ONLY_EXPERTS if isinstance(form, Int4) else ()
    quantize_checkpoint(moe, made, form, rules, workers=2)
    config = json.loads((made / "config.json").read_text())
    assert read_format(config["quantization_config"]) == form
    weights, written = tensors_of(moe), tensors_of(made)
    quantizer = Quantizer.of_checkpoint(made)
    assert quantizer is not None
    pushed = dict(quantizer.stream(weights.items()))
    assert pushed.keys() == written.keys()
    assert all(
        torch.equal(pushed[n].flatten().view(torch.uint8), written[n].flatten().view(torch.uint8)) for n in pushed
    )

    chosen = {n.removesuffix(form.marker) for n in written if n.endswith(form.marker)}
    projections = ("gate_proj", "up_proj", "down_proj", *(() if rules else ("q_proj", "k_proj", "v_proj", "o_proj")))
    assert chosen == {n for n in weights if n.endswith(tuple(f".{p}.weight" for p in projections))}
    by_rules = rules_of(config["quantization_config"])
    assert chosen == {n for n, weight in weights.items() if by_rules(n, weight.shape)}

    to_bf16(made, again)
    for n, tensor in tensors_of(again).items():
        expected = form.dequantize(form.quantize(weights[n])) if n in chosen else weights[n]
        assert torch.equal(tensor, expected), n
    assert tensors_of(again).keys() == weights.keys()
    assert "quantization_config" not in json.loads((again / "config.json").read_text())
    sizes = json.loads((made / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert sizes == sum(tensor.nbytes for tensor in written.values())
    assert (made / "tokenizer.json").read_bytes() == (moe / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("family", ["glm4", "deepseek_v3", "qwen3_5_moe-whole", "qwen3_next", "minimax_m2"])
def test_other_families_round_trip(tmp_path: Path, family: str) -> None:
    source = Path(make_checkpoint(tmp_path, family))
    quantize_checkpoint(source, tmp_path / "made", Fp8((16, 16), "block"))
    to_bf16(tmp_path / "made", tmp_path / "again")
    weights, again, made = tensors_of(source), tensors_of(tmp_path / "again"), tensors_of(tmp_path / "made")
    assert weights.keys() == again.keys()
    for n, weight in weights.items():
        assert (again[n].float() - weight.float()).abs().max() <= weight.abs().max() / 16, n
    plain = [n for n in made if made[n].ndim > 1 and n + "_scale_inv" not in made and not n.endswith("_scale_inv")]
    listed = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert sorted(listed["modules_to_not_convert"]) == sorted(n.removesuffix(".weight") for n in plain)


def test_what_was_killed_continues(moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, out, form = tmp_path / "whole", tmp_path / "out", FORMATS["block"]
    quantize_checkpoint(moe, whole, form)
    write, written = hf_writer.write_tensors, []

    def killed_at_the_third(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        if len(written) == 2:
            path.with_name(f"{path.name}.unfinished").write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, tensors)

    monkeypatch.setattr(hf_writer, "write_tensors", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(moe, out, form)
    assert not out.exists()
    monkeypatch.setattr(
        hf_writer, "write_tensors", lambda path, tensors: (written.append(path.name), write(path, tensors))
    )
    quantize_checkpoint(moe, out, form)
    assert sorted(written) == [hf_writer.shard_name(number, 3) for number in (1, 2, 3)]
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {p.name: p.read_bytes() for p in whole.iterdir()}

    del written[2:]  # other work under the same name begins again
    monkeypatch.setattr(hf_writer, "write_tensors", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(moe, tmp_path / "third", form)
    monkeypatch.setattr(hf_writer, "write_tensors", write)
    quantize_checkpoint(moe, tmp_path / "third", FORMATS["ue8m0"])
    assert Quantizer.of_checkpoint(tmp_path / "third").format == FORMATS["ue8m0"]  # type: ignore[union-attr]


def test_a_disk_that_lies_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    def flipped(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, path, metadata)

    monkeypatch.setattr(safetensors.torch, "save_file", flipped)
    with pytest.raises(OSError, match="a is not what was written"):
        hf_writer.write_tensors(tmp_path / "file", {"a": torch.zeros(3)})
    assert not (tmp_path / "file").exists()


def test_tensors_that_are_named_like_scales_stay(tmp_path: Path) -> None:
    """CLIP has a ``logit_scale``, and engines put ``k_scale`` beside attention: no weight of theirs is quantized."""
    source, form = tmp_path / "source", Fp8(per="channel")
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"quantization_config": form.config([])}))
    named = {"logit_scale": torch.tensor(4.6), "model.self_attn.k_scale": torch.tensor(0.5)}
    parts = form.quantize(torch.full((2, 2), 3.0))
    save_file(named | {f"model.q.weight{suffix}": part for suffix, part in parts.items()}, source / "model.safetensors")
    to_bf16(source, tmp_path / "made")
    made = tensors_of(tmp_path / "made")
    assert made.keys() == {*named, "model.q.weight"}
    assert all(torch.equal(made[name], tensor) for name, tensor in named.items())
    assert torch.equal(made["model.q.weight"], torch.full((2, 2), 3.0, dtype=torch.bfloat16))


def test_what_cannot_be_converted(moe: Path, tmp_path: Path) -> None:
    block = FORMATS["block"]
    with pytest.raises(ValueError, match="is not quantized"):
        to_bf16(moe, tmp_path / "made")
    with pytest.raises(FileExistsError, match="exists already"):
        quantize_checkpoint(moe, moe, block)
    with pytest.raises(ValueError, match="would remove"):
        quantize_checkpoint(moe, moe.parent, block, force=True)
    with pytest.raises(ValueError, match="leave no linear layer"):
        quantize_checkpoint(moe, tmp_path / "made", block, ["re:.*"])
    with pytest.raises(ValueError, match=r"mlp\.experts\.\d\.\w+_proj\.weight: .*group size 48"):
        quantize_checkpoint(moe, tmp_path / "made", Int4(48), ONLY_EXPERTS)
    assert list(tmp_path.iterdir()) == []
    quantize_checkpoint(moe, tmp_path / "made", block)
    with pytest.raises(ValueError, match="is quantized already"):
        quantize_checkpoint(tmp_path / "made", tmp_path / "twice", block)
    shutil.copytree(tmp_path / "made", tmp_path / "lacks")
    for file in (tmp_path / "lacks").glob("*.safetensors"):
        save_file(
            {n: t for n, t in load_file(file).items() if not n.endswith("0.self_attn.q_proj.weight_scale_inv")}, file
        )
    (tmp_path / "lacks" / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"FP8 weight .*0\.self_attn\.q_proj\.weight .* has no .*weight_scale_inv"):
        to_bf16(tmp_path / "lacks", tmp_path / "never")
    assert not list(tmp_path.glob("*never*"))
    quantize_checkpoint(moe, tmp_path / "made", FORMATS["tensor"], force=True)
    assert Quantizer.of_checkpoint(tmp_path / "made").format == FORMATS["tensor"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("rule", "ignored"),
    [
        ("model.layers.1", "model.layers.1.mlp.up_proj"), ("mlp.gate", "model.layers.0.mlp.gate"),
        ("re:.*self_attn.*", "model.layers.0.self_attn.q_proj"), (r"re:.*mlp\.gate\..*", "model.layers.0.mlp.gate"),
        ("lm_head", "lm_head"), ("model.layers.1.", "model.layers.1.mlp.up_proj"),
    ],
)  # fmt: skip
def test_rules(rule: str, ignored: str) -> None:
    assert ignores(rule, f"{ignored}.weight")
    assert not ignores(rule, "model.layers.10.mlp.gate_proj.weight")


@pytest.mark.parametrize(
    "described",
    [
        {"quant_method": "awq"}, {"quant_method": "fp8", "activation_scheme": "static"},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}}},
    ],
)  # fmt: skip
def test_formats_that_are_not_available(described: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="available"):
        read_format(described)


def test_compressed_tensors_reads_the_configuration() -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    for name in ("channel", "int4", "int4-asymmetric"):
        read = quantization.QuantizationConfig.model_validate(FORMATS[name].config(["lm_head"]))
        assert read.config_groups["group_0"].weights.symmetric == (name != "int4-asymmetric")


def test_mxfp4_of_gpt_oss_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    source = Path(make_checkpoint(tmp_path, "gpt_oss"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    tensors = load_file(source / "model.safetensors")
    expected = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(110, 140, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        expected[name] = convert_moe_packed_tensors(blocks, scales)
        assert expected[name].shape == (experts, inputs, outputs)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    to_bf16(source, tmp_path / "bf16")
    seen = tensors_of(tmp_path / "bf16")
    assert seen.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in seen.items())
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
