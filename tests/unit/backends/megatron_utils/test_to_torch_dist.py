"""A Hugging Face checkpoint in Megatron's torch_dist form: what is stored, and that nothing half-done counts."""

from __future__ import annotations

import json
import weakref
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slime.backends.megatron_utils.checkpoints import to_torch_dist as module
from slime.backends.megatron_utils.checkpoints.convert import Conversion, convert, differences
from slime.backends.megatron_utils.checkpoints.to_torch_dist import Entry, to_torch_dist
from slime.backends.megatron_utils.checkpoints.torch_dist import TorchDistCheckpoint
from slime.weights.quantization import Fp8, Int4
from slime.weights.quantization.files import quantize_checkpoint, to_bf16
from tests.unit.backends.megatron_utils.test_convert import CONFIG, LAYERS, VOCAB, hf_tensors, megatron_tensors
from tests.unit.weights.quantization.test_files import split
from tools import convert_hf_to_torch_dist
from tools.tiny_model import make_tiny_checkpoint

STATES_OF_TE = (  # of the modules of a layer with experts that are TransformerEngine's, in megatron-core 0.16
    *("self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention"),
    *("self_attention.q_layernorm", "self_attention.k_layernorm", "pre_mlp_layernorm"),
)


@pytest.fixture(scope="module")
def hf() -> dict[str, torch.Tensor]:
    return hf_tensors()


@pytest.fixture
def source(tmp_path: Path, hf: dict[str, torch.Tensor]) -> Path:
    """A model with experts in three files; the parts of a fused weight are in several."""
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(hf, directory / "model.safetensors")
    split(directory, 3)
    return directory


def stored(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and the other objects, read by PyTorch."""
    found = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    sizes = {key: part for key, part in found.items() if isinstance(part, TensorStorageMetadata)}
    tensors = {key: torch.empty(part.size, dtype=part.properties.dtype) for key, part in sizes.items()}
    state: dict[str, Any] = {**dict.fromkeys(found), **tensors}
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    return tensors, {key: state[key] for key in found.keys() - tensors.keys()}


def with_numbered_layers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    numbered = {}
    for key, tensor in tensors.items():
        if key.startswith("decoder.layers."):
            for i, layer in enumerate(tensor):
                numbered[key.replace("layers.", f"layers.{i}.", 1)] = layer
        else:
            numbered[key] = tensor
    return numbered


def test_what_megatron_stores_is_stored(tmp_path: Path, source: Path, hf: dict[str, torch.Tensor]) -> None:
    to_torch_dist(source, tmp_path / "out")
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    tensors, objects = stored(tmp_path / "out" / "release")
    expected = with_numbered_layers(megatron_tensors(hf, rows=VOCAB))
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], tensor) for key, tensor in expected.items())
    assert all(tensors[key].dtype == torch.bfloat16 for key in expected)
    assert set(map(str, objects.values())) == {"[None]"}
    experts = [f"mlp.experts.experts.linear_fc{fc}._extra_state/shard_{i}_3" for fc in (1, 2) for i in range(3)]
    states = [*experts, *(f"{name}._extra_state/shard_0_1" for name in STATES_OF_TE)]
    assert objects.keys() >= {f"decoder.layers.{i}.{state}" for i in range(LAYERS) for state in states}
    assert "decoder.final_layernorm._extra_state/shard_0_1" in objects
    names = {path.name for path in (tmp_path / "out" / "release").iterdir()}
    files = {f"__{i}_0.distcp" for i in range(4)}
    assert names == {*files, ".metadata", "metadata.json", "common.pt"}
    with torch.serialization.safe_globals([Namespace]):
        common = torch.load(tmp_path / "out" / "release" / "common.pt", weights_only=True)
    assert common["content_metadata"]["non_homogeneous_layers"] is True
    assert "optimizer" not in common
    assert common["args"].num_layers == LAYERS


@pytest.mark.parametrize("name", ["qwen3", "qwen2_moe"])
def test_there_and_back(tmp_path: Path, name: str) -> None:
    origin = make_tiny_checkpoint(tmp_path / name, name)
    to_torch_dist(origin, tmp_path / "megatron")
    assert differences(convert(Conversion(tmp_path / "megatron", tmp_path / "back", origin)), origin) == []
    arguments = TorchDistCheckpoint(tmp_path / "megatron").training_args()
    assert arguments is not None
    made = convert(Conversion(tmp_path / "megatron", tmp_path / "alone", model_name=name))
    assert differences(made, origin) == []


def test_what_was_killed_continues(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = module.write_entries, []

    def write_entries(path: Path, *rest: Any) -> Any:
        if len(written) == 2:
            written.append("killed")
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(path.name)
        return write(path, *rest)

    monkeypatch.setattr(module, "write_entries", write_entries)
    with pytest.raises(KeyboardInterrupt):
        to_torch_dist(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    to_torch_dist(source, tmp_path / "out")
    assert written == ["__0_0.distcp", "__1_0.distcp", "killed", "__2_0.distcp"]
    assert differences(convert(Conversion(tmp_path / "out", tmp_path / "back", source)), source) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "out", "source"]


def test_one_weight_is_in_memory_at_a_time(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = Entry.tensor, list[weakref.ref[torch.Tensor]]()

    def tensor(entry: Entry, *rest: Any) -> torch.Tensor:
        assert sum(reference() is not None for reference in made) <= 1  # the one before, until this takes its place
        found = make(entry, *rest)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Entry, "tensor", tensor)
    to_torch_dist(source, tmp_path / "out")
    assert len(made) == 3 + LAYERS * (7 + 2 * 3)  # qkv, projection and five others; two of each of three experts


def test_another_source_does_not_continue(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_complete", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        to_torch_dist(source, tmp_path / "out")
    monkeypatch.undo()
    file = min(source.glob("*.safetensors"))
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    to_torch_dist(source, tmp_path / "out")
    assert differences(convert(Conversion(tmp_path / "out", tmp_path / "back", source)), source) == []


def test_what_the_disk_changes_is_found(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **more: -load(*args, **more))
    with pytest.raises(OSError, match=r"__0_0\.distcp: .* is not what was written; is the disk damaged\?"):
        to_torch_dist(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", [Fp8((16, 16), "block"), Int4(8)], ids=["fp8", "int4"])
def test_quantized_weights_are_decoded(tmp_path: Path, form: Any) -> None:
    origin = make_tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    quantize_checkpoint(origin, tmp_path / "quantized", form)
    split(tmp_path / "quantized", 3)  # scales are in other files than weights
    to_bf16(tmp_path / "quantized", tmp_path / "bf16")
    to_torch_dist(tmp_path / "quantized", tmp_path / "out")
    made = convert(Conversion(tmp_path / "out", tmp_path / "back", tmp_path / "bf16"))
    assert differences(made, tmp_path / "bf16") == []
    assert differences(made, origin) != []


def test_an_output_is_replaced_when_asked(tmp_path: Path, source: Path) -> None:
    words = ["--hf-checkpoint", str(source), "--save", str(tmp_path / "out"), "--num-layers", "2"]
    convert_hf_to_torch_dist.main(words)
    assert (tmp_path / "out").is_symlink()
    with pytest.raises(SystemExit, match="exists already: choose another directory, or -f"):
        convert_hf_to_torch_dist.main([*words, "--torch-dist"])
    with pytest.raises(SystemExit, match="2"):  # a link is not replaced
        convert_hf_to_torch_dist.main([*words, "--force"])
    for _ in range(2):  # a link first, then a directory
        convert_hf_to_torch_dist.main([*words, "--torch-dist", "--force"])
        assert (tmp_path / "out" / "release" / ".metadata").is_file()
    assert not (tmp_path / "out").is_symlink()
    assert (source / "config.json").is_file()
    with pytest.raises(ValueError, match="refusing to write to"):
        to_torch_dist(source, source, force=True)


O_PROJ, UP = "model.layers.1.self_attn.o_proj.weight", "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (O_PROJ, None, rf"1 tensors of the model are missing: {O_PROJ}"),
        (UP, None, rf"1 tensors of the model are missing: {UP}"),
        (
            UP.replace("up", "down"),
            None,
            r"1 tensors of the model are missing: model\.layers\.1\.mlp\.experts\.2\.down",
        ),
        ("lm_head.weight", None, r"1 tensors of the model are missing: lm_head\.weight"),
        ("model.layers.1.mlp.more.weight", torch.ones(2), r"1 tensors have no place .*: model\.layers\.1\.mlp\.more"),
        ("model.layers.2.input_layernorm.weight", torch.ones(8), r"1 tensors have no place .*: model\.layers\.2\."),
        (O_PROJ, torch.ones(8), rf"{O_PROJ} \[8\] \(in model.safetensors\): expected"),
        ("lm_head.weight", torch.ones(9, 8), r"lm_head.weight \[9, 8\] .*: expected \[10, 8\]"),
        (UP, torch.ones(6, 8), r"are one weight of Megatron's, and have the dtypes"),
        (O_PROJ, torch.ones(8, 16).to(torch.float8_e4m3fn), rf"the FP8 weight {O_PROJ} .* has no {O_PROJ}_scale_inv"),
    ],
)
def test_what_is_no_whole_model_is_refused(
    tmp_path: Path, hf: dict[str, torch.Tensor], name: str, tensor: torch.Tensor | None, message: str
) -> None:
    tensors = {**hf, **({} if tensor is None else {name: tensor})}
    if tensor is None:
        del tensors[name]
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        to_torch_dist(directory, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
