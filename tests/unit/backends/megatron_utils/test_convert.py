"""A torch_dist checkpoint written by hand becomes the Hugging Face checkpoint that it was made of."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from slime.backends.megatron_utils.checkpoints.convert import Conversion, convert, differences
from slime.backends.megatron_utils.checkpoints.torch_dist import TorchDistCheckpoint
from slime.weights.hf import writer as hf_writer
from tools import convert_to_hf, convert_torch_dist_to_hf

LAYERS, HIDDEN, HEADS, GROUPS, HEAD, FFN, EXPERTS, VOCAB, PADDED = 2, 8, 4, 2, 4, 6, 3, 10, 16
CONFIG = {
    "model_type": "qwen3_moe", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS, "head_dim": HEAD, "num_experts": EXPERTS, "vocab_size": VOCAB, "dtype": "float32",
}  # fmt: skip
ROOT = Path(__file__).parents[4]
BACKENDS = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
            "common_backend_version": 1}  # fmt: skip


def hf_tensors() -> dict[str, torch.Tensor]:
    """Return a bf16 model with values of its own in every place."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    tensors = {
        "model.embed_tokens.weight": draw(VOCAB, HIDDEN), "model.norm.weight": draw(HIDDEN),
        "lm_head.weight": draw(VOCAB, HIDDEN),
    }  # fmt: skip
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        tensors[f"{at}input_layernorm.weight"] = draw(HIDDEN)
        tensors[f"{at}post_attention_layernorm.weight"] = draw(HIDDEN)
        for name, rows in (("q", HEADS * HEAD), ("k", GROUPS * HEAD), ("v", GROUPS * HEAD)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = draw(rows, HIDDEN)
        tensors[f"{at}self_attn.o_proj.weight"] = draw(HIDDEN, HEADS * HEAD)
        for name in ("q_norm", "k_norm"):
            tensors[f"{at}self_attn.{name}.weight"] = draw(HEAD)
        tensors[f"{at}mlp.gate.weight"] = draw(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name, shape in (("gate", (FFN, HIDDEN)), ("up", (FFN, HIDDEN)), ("down", (HIDDEN, FFN))):
                tensors[f"{at}mlp.experts.{expert}.{name}_proj.weight"] = draw(*shape)
    return tensors


def megatron_tensors(
    hf: dict[str, torch.Tensor], *, heads: int = HEADS, groups: int = GROUPS, experts: int = EXPERTS, rows: int = PADDED
) -> dict[str, torch.Tensor]:
    """Return them as Megatron stores them: layers and experts stacked, query groups interleaved, padded to ``rows``."""
    head = len(hf["model.layers.0.self_attn.q_norm.weight"])

    def per_layer(make: Any) -> torch.Tensor:
        return torch.stack([make(f"model.layers.{layer}.") for layer in range(LAYERS)])

    def qkv(at: str) -> torch.Tensor:
        q, k, v = (hf[f"{at}self_attn.{x}_proj.weight"] for x in "qkv")
        parts, of_group = [], heads // groups * head
        for group in range(groups):
            parts += [q[group * of_group : (group + 1) * of_group]]
            parts += [x[group * head : (group + 1) * head] for x in (k, v)]
        return torch.cat(parts)

    def expert(at: str, i: int, *names: str) -> torch.Tensor:
        return torch.cat([hf[f"{at}mlp.experts.{i}.{name}_proj.weight"] for name in names])

    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.zeros(rows - len(x), x.shape[1], dtype=x.dtype)])

    def copied(name: str) -> torch.Tensor:
        return per_layer(lambda at: hf[at + name])

    layers = "decoder.layers."
    return {
        "embedding.word_embeddings.weight": padded(hf["model.embed_tokens.weight"]),
        "output_layer.weight": padded(hf["lm_head.weight"]),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        f"{layers}self_attention.linear_qkv.layer_norm_weight": copied("input_layernorm.weight"),
        f"{layers}self_attention.linear_qkv.weight": per_layer(qkv),
        f"{layers}self_attention.linear_proj.weight": copied("self_attn.o_proj.weight"),
        f"{layers}self_attention.q_layernorm.weight": copied("self_attn.q_norm.weight"),
        f"{layers}self_attention.k_layernorm.weight": copied("self_attn.k_norm.weight"),
        f"{layers}pre_mlp_layernorm.weight": copied("post_attention_layernorm.weight"),
        f"{layers}mlp.router.weight": copied("mlp.gate.weight"),
        f"{layers}mlp.experts.experts.linear_fc1.weight": per_layer(
            lambda at: torch.stack([expert(at, i, "gate", "up") for i in range(experts)])
        ),
        f"{layers}mlp.experts.experts.linear_fc2.weight": per_layer(
            lambda at: torch.stack([expert(at, i, "down") for i in range(experts)])
        ),
    }


def write_torch_dist(directory: Path, tensors: dict[str, torch.Tensor], common: dict[str, Any] | None = None) -> Path:
    extra = {"optimizer.state.exp_avg.output_layer.weight": torch.ones(3), "rng_state": {"seed": 1}}
    dcp.save({**tensors, **extra}, checkpoint_id=directory, no_dist=True)
    (directory / "metadata.json").write_text(json.dumps(BACKENDS))
    torch.save(common or {"iteration": 7}, directory / "common.pt")
    return directory


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.fixture(scope="module")
def hf() -> dict[str, torch.Tensor]:
    return hf_tensors()


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory, hf: dict[str, torch.Tensor]) -> Path:
    directory = tmp_path_factory.mktemp("origin")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text("{}")
    save_file({name: torch.zeros_like(tensor) for name, tensor in hf.items()}, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory, hf: dict[str, torch.Tensor]) -> Path:
    root = tmp_path_factory.mktemp("save")
    write_torch_dist(root / "iter_0000007", megatron_tensors(hf))
    (root / "latest_checkpointed_iteration.txt").write_text("7\n")
    return root


@pytest.mark.parametrize(("readers", "writers"), [(1, 1), (2, 3)])
def test_every_tensor_is_exported_in_files_of_the_requested_size(
    tmp_path: Path, save: Path, origin: Path, hf: dict[str, torch.Tensor], readers: int, writers: int
) -> None:
    out = tmp_path / "out"
    convert(Conversion(save, out, origin, chunk_bytes=600, readers=readers, writers=writers))
    made = read_all(out)
    assert made.keys() == hf.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in hf.items())
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        tensors = load_file(out / file)
        assert sum(t.nbytes for t in tensors.values()) <= 600 or len(tensors) <= 3  # one weight may be larger
        assert {name for name, at in index["weight_map"].items() if at == file} == set(tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in hf.values())
    assert json.loads((out / "config.json").read_text()) == {**CONFIG, "dtype": "bfloat16"}
    assert (out / "tokenizer.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_what_was_killed_continues(
    tmp_path: Path, save: Path, origin: Path, monkeypatch: pytest.MonkeyPatch, hf: dict[str, torch.Tensor]
) -> None:
    conversion = Conversion(save, tmp_path / "out", origin, chunk_bytes=600)
    write, written = hf_writer.write_tensors, []

    def killed_at_the_third(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, tensors)

    def noted(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        written.append(path.name)
        write(path, tensors)

    monkeypatch.setattr(hf_writer, "write_tensors", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        convert(conversion)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(hf_writer, "write_tensors", noted)
    made = read_all(convert(conversion))
    assert all(torch.equal(made[name], tensor) for name, tensor in hf.items())
    assert len(written) == len(set(written)) == len(list((tmp_path / "out").glob("*.safetensors")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_padding_is_kept_or_cut_as_asked(tmp_path: Path, save: Path, origin: Path, hf: dict[str, torch.Tensor]) -> None:
    config = tmp_path / "config only"
    config.mkdir()
    (config / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "fp8"}}))
    convert(Conversion(save, tmp_path / "all", config, vocab_size=PADDED))
    made = read_all(tmp_path / "all")["lm_head.weight"]
    assert torch.equal(made[:VOCAB], hf["lm_head.weight"])
    assert made.shape == (PADDED, HIDDEN)
    convert(Conversion(save, tmp_path / "few", origin, vocab_size=7))
    assert torch.equal(read_all(tmp_path / "few")["lm_head.weight"], hf["lm_head.weight"][:7])
    written = json.loads((tmp_path / "all" / "config.json").read_text())
    assert written == {**CONFIG, "vocab_size": PADDED, "dtype": "bfloat16"}  # and no longer says that it is quantized
    with pytest.raises(ValueError, match="has 16 rows of vocabulary, fewer than the 17 asked for"):
        convert(Conversion(save, tmp_path / "many", origin, vocab_size=17))


def test_megatron_s_arguments_say_what_a_missing_config_does_not(tmp_path: Path, hf: dict[str, torch.Tensor]) -> None:
    args = argparse.Namespace(
        num_attention_heads=HEADS, num_query_groups=GROUPS, group_query_attention=True, kv_channels=HEAD,
        hidden_size=HIDDEN, num_layers=LAYERS, num_experts=EXPERTS, dtype=torch.bfloat16, path=Path("/somewhere"),
    )  # fmt: skip
    write_torch_dist(tmp_path / "release", megatron_tensors(hf), {"args": args})
    found = TorchDistCheckpoint(tmp_path / "release").training_args()
    assert found is not None
    assert found.num_query_groups == GROUPS
    assert not isinstance(found.path, Path)  # nothing but plain values is made of a file
    with pytest.raises(ValueError, match=r"give --origin-hf-dir .* or --model-name"):
        convert(Conversion(tmp_path / "release", tmp_path / "out"))
    convert(Conversion(tmp_path / "release", tmp_path / "out", model_name="Qwen3MoeConfig", vocab_size=VOCAB))
    made = read_all(tmp_path / "out")
    assert all(torch.equal(made[name], tensor) for name, tensor in hf.items())


def test_what_only_the_origin_has_is_named_or_taken(
    tmp_path: Path, save: Path, hf: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "config.json").write_text(json.dumps(CONFIG))
    name, more = "model.layers.1.mlp.more.weight", torch.arange(4.0)
    save_file({**{n: torch.zeros_like(t) for n, t in hf.items()}, name: more}, origin / "model.safetensors")
    with pytest.raises(ValueError, match=rf"lacks 1 tensors of .*: {name}\. --add-missing-from-origin-hf takes them"):
        convert(Conversion(save, tmp_path / "out", origin))
    convert(Conversion(save, tmp_path / "out", origin, add_missing=True))
    made = read_all(tmp_path / "out")
    assert torch.equal(made.pop(name), more)
    assert all(torch.equal(made[n], tensor) for n, tensor in hf.items())
    assert differences(tmp_path / "out", origin)[0].startswith("lm_head.weight differs by up to")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"num_key_value_heads": 4},
            r"linear_qkv\.weight is \[32, 8\], expected .*Is --origin-hf-dir the model",
        ),
        ({"model_type": "qwen3"}, "the weight map of 'qwen3' has no rule for"),
        ({"model_type": "mistral"}, "no weight map for model_type 'mistral'"),
    ],
)
def test_another_model_s_configuration(tmp_path: Path, save: Path, config: dict[str, Any], message: str) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "config.json").write_text(json.dumps({**CONFIG, **config}))
    with pytest.raises(ValueError, match=message):
        convert(Conversion(save, tmp_path / "out", origin))
    assert not (tmp_path / "out").exists()


def test_weights_of_another_shape_than_the_origin_s(tmp_path: Path, save: Path, hf: dict[str, torch.Tensor]) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "config.json").write_text(json.dumps(CONFIG))
    tensors = {name: tensor for name, tensor in hf.items() if name != "lm_head.weight"}
    save_file(tensors, origin / "model.safetensors")
    with pytest.raises(ValueError, match=r"the weights are not those of .*, which has no lm_head\.weight \[10, 8\]"):
        convert(Conversion(save, tmp_path / "out", origin))


def test_an_output_is_replaced_only_by_force_and_only_when_the_new_one_is_whole(
    tmp_path: Path, save: Path, origin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("kept")
    with pytest.raises(FileExistsError, match="choose another directory, or -f to replace it"):
        convert(Conversion(save, out, origin))
    read = TorchDistCheckpoint.read

    def fails_late(self: TorchDistCheckpoint, weight: Any) -> torch.Tensor:
        if weight.name == "output_layer.weight":
            raise OSError("the disk is gone")
        return read(self, weight)

    with monkeypatch.context() as patch:
        patch.setattr(TorchDistCheckpoint, "read", fails_late)
        with pytest.raises(OSError, match="the disk is gone"):
            convert(Conversion(save, out, origin, force=True, chunk_bytes=600))
    assert [path.name for path in out.iterdir()] == ["old"]
    convert(Conversion(save, out, origin, force=True))
    assert not (out / "old").exists()
    with pytest.raises(ValueError, match="would remove --input-dir"):
        convert(Conversion(save, origin.parent, origin, force=True))


def test_a_part_that_no_rank_wrote(tmp_path: Path, hf: dict[str, torch.Tensor], origin: Path) -> None:
    directory = write_torch_dist(tmp_path / "iter_0000001", megatron_tensors(hf))
    checkpoint = TorchDistCheckpoint(directory)
    weight = next(w for w in checkpoint.weights if w.name == "decoder.final_layernorm.weight")
    checkpoint._metadata.state_dict_metadata[weight.key].chunks.clear()
    with pytest.raises(ValueError, match=r"0 of 8 numbers of decoder\.final_layernorm\.weight \[8\] are stored"):
        checkpoint.read(weight)


def test_what_is_no_checkpoint(tmp_path: Path, origin: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        convert(Conversion(tmp_path / "nowhere", tmp_path / "out", origin))
    with pytest.raises(ValueError, match=r"no torch_dist checkpoint: it has no \.metadata and no common\.pt"):
        convert(Conversion(origin, tmp_path / "out", origin))


def run(tool: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run the command by its path, from elsewhere and with nothing on PYTHONPATH."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "tools" / tool), *map(str, words)]
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_the_commands(
    tmp_path: Path, save: Path, origin: Path, hf: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    """One as users run it, the others in this process: each start imports torch."""
    shared = [*map(str, ("--input-dir", save, "--origin-hf-dir", origin, "--output-dir", tmp_path / "a"))]
    done = run("convert_torch_dist_to_hf_parallel.py", *shared, "--save-max-workers", 2)
    assert done.returncode == 0, done.stderr
    assert all(torch.equal(read_all(tmp_path / "a")[name], tensor) for name, tensor in hf.items())
    with pytest.raises(SystemExit, match=f"^{tmp_path / 'a'} exists already: choose another directory, or -f to"):
        convert_torch_dist_to_hf.main(shared)
    same = ("--load", save, "--output-dir", tmp_path / "b", "--num-layers", 2, "--check-same", "--hf-checkpoint")
    convert_to_hf.main([*map(str, same), str(tmp_path / "a")])
    said = capsys.readouterr().out
    assert "not needed, config.json describes the model: --num-layers 2" in said
    assert "all tensors equal those of" in said


@pytest.mark.parametrize(
    ("form", "files"), [("torch", ["mp_rank_00/model_optim_rng.pt"]), ("torch_dcp", [".metadata", "__0_0.distcp"])]
)
def test_checkpoints_of_other_formats_are_named(form: str, files: list[str], tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    for name in files:
        path = tmp_path / "iter_0000003" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    with pytest.raises(ValueError, match=rf"is of --ckpt-format {form}, and torch_dist is what is converted"):
        TorchDistCheckpoint(tmp_path)
