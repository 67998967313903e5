"""The maps of single families: layouts against element-by-element descriptions, and what is left unread."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils.weights.layouts import Dims, QueryKey, Transposed
from slime.backends.megatron_utils.weights.maps import FAMILIES, family_of
from slime.backends.megatron_utils.weights.maps.glm4 import FusedGateUp
from slime.backends.megatron_utils.weights.maps.parts import GatedQueryKeyValue, HiddenFirst
from slime.backends.megatron_utils.weights.untrained import carried_names, write_carried
from slime.models.facts import trained_families
from slime.weights.hf.checkpoint import HfCheckpoint

HEADS, GROUPS, D, HIDDEN = 8, 4, 3, 5
DIMS = Dims(HEADS, GROUPS, D, vocab_size=10, padded_vocab_size=16)


def _labeled(rows: list[tuple[str, int, int]]) -> torch.Tensor:
    """Return ``[rows, HIDDEN]`` in which a row's numbers tell what it is, which head it belongs to, and its channel."""
    kinds = {"query": 0, "gate": 1, "key": 2, "value": 3}
    numbers = torch.tensor([1000 * kinds[kind] + 10 * head + channel for kind, head, channel in rows])
    return numbers[:, None] + torch.arange(HIDDEN) * 10_000.0


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_gates_lie_behind_the_queries_of_their_group(tp_size: int) -> None:
    q = [(kind, head, c) for head in range(HEADS) for kind in ("query", "gate") for c in range(D)]
    k, v = ([(kind, group, c) for group in range(GROUPS) for c in range(D)] for kind in ("key", "value"))
    sources = [_labeled(rows) for rows in (q, k, v)]
    wanted = []
    for group in range(GROUPS):
        own = range(group * HEADS // GROUPS, (group + 1) * HEADS // GROUPS)
        wanted += [(kind, head, c) for kind in ("query", "gate") for head in own for c in range(D)]
        wanted += [(kind, group, c) for kind in ("key", "value") for c in range(D)]
    layout = GatedQueryKeyValue()
    shards = [layout.shard(sources, rank, tp_size, DIMS) for rank in range(tp_size)]
    assert torch.equal(torch.cat(shards), _labeled(wanted))
    back = layout.unshard(shards, DIMS)
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(back, sources, strict=True))
    assert layout.hf_shapes(tuple(shards[0].shape), tp_size, DIMS) == [tuple(s.shape) for s in sources]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_keys_lie_behind_the_queries_of_their_group_where_they_are_the_values(tp_size: int) -> None:
    """Two groups of heads of six numbers, whatever the other layers have."""
    groups, d = 2, 6
    q = [("query", head, c) for head in range(HEADS) for c in range(d)]
    k = [("key", group, c) for group in range(groups) for c in range(d)]
    sources, wanted = [_labeled(q), _labeled(k)], []
    for group in range(groups):
        wanted += [("query", head, c) for head in range(group * 4, group * 4 + 4) for c in range(d)]
        wanted += [("key", group, c) for c in range(d)]
    layout, dims = QueryKey(), replace(DIMS, shared_groups=groups, shared_channels=d)
    assert sum(layout.hf_shapes((len(wanted) // tp_size, HIDDEN), tp_size, dims), ()) == (48, HIDDEN, 12, HIDDEN)
    shards = [layout.shard(sources, rank, tp_size, dims) for rank in range(tp_size)]
    assert torch.equal(torch.cat(shards), _labeled(wanted))
    back = layout.unshard(shards, dims)
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(back, sources, strict=True))


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_a_projection_of_hidden_states_and_embeddings_changes_sides(tp_size: int) -> None:
    """Columns 0 to 3 are for hidden states, 4 to 7 for embeddings; Megatron has embeddings first."""
    source = 100 * torch.arange(6.0)[:, None] + torch.arange(8)
    layout = HiddenFirst()
    shards = [layout.shard([source], rank, tp_size, DIMS) for rank in range(tp_size)]
    assert torch.equal(torch.cat(shards)[0], torch.tensor([4.0, 5, 6, 7, 0, 1, 2, 3]))
    assert torch.equal(layout.unshard(shards, DIMS)[0], source)
    assert layout.hf_shapes(tuple(shards[0].shape), tp_size, DIMS) == [(6, 8)]


@pytest.mark.parametrize(
    ("model_type", "part", "name"),
    [
        ("mimo", "enorm.weight", "model.mtp_layers.1.token_layernorm.weight"),
        ("mimo", "hnorm.weight", "model.mtp_layers.1.hidden_layernorm.weight"),
        ("mimo", "transformer_layer.self_attention.linear_proj.weight", "model.mtp_layers.1.self_attn.o_proj.weight"),
        ("deepseek_v3", "enorm.weight", "model.layers.1.enorm.weight"),
        ("deepseek_v3", "final_layernorm.weight", "model.layers.1.shared_head.norm.weight"),
        ("glm4_moe", "transformer_layer.mlp.router.weight", "model.layers.1.mlp.gate.weight"),
        ("qwen3_next", "eh_proj.weight", "mtp.fc.weight"),
        ("qwen3_next", "enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
        ("qwen3_next", "transformer_layer.mlp.router.weight", "mtp.layers.1.mlp.gate.weight"),
        ("qwen3_5", "transformer_layer.mlp.linear_fc2.weight", "mtp.layers.1.mlp.down_proj.weight"),
    ],
)
def test_names_of_mtp_layers(model_type: str, part: str, name: str) -> None:
    rule, place = family_of(model_type).find(f"mtp.layers.1.{part}")
    assert rule.hf_names(place.layer) == [name]  # of relatives of DeepSeek-V3 the number is counted on afterwards


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_one_tensor_of_gate_and_up(tp_size: int) -> None:
    source = torch.arange(12.0)[:, None] * torch.ones(HIDDEN)
    layout = FusedGateUp()
    shards = [layout.shard([source], rank, tp_size, DIMS) for rank in range(tp_size)]
    block = 6 // tp_size
    for rank, shard in enumerate(shards):
        own = list(range(rank * block, (rank + 1) * block))
        assert shard[:, 0].tolist() == own + [6 + row for row in own]
    (back,) = layout.unshard(shards, DIMS)
    assert torch.equal(back, source)
    assert layout.hf_shapes(tuple(shards[0].shape), tp_size, DIMS) == [tuple(source.shape)]


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_a_transposed_tensor_of_gate_and_up(tp_size: int) -> None:
    rows = torch.arange(12.0)[:, None] + 100 * torch.arange(HIDDEN)
    layout = Transposed(FusedGateUp())
    source = rows.t().contiguous()
    shards = [layout.shard([source], rank, tp_size, DIMS) for rank in range(tp_size)]
    assert torch.equal(shards[0], FusedGateUp().shard([rows], 0, tp_size, DIMS))
    (back,) = layout.unshard(shards, DIMS)
    assert torch.equal(back, source)
    assert back.is_contiguous()
    assert layout.hf_shapes(tuple(shards[0].shape), tp_size, DIMS) == [tuple(source.shape)]


@pytest.mark.parametrize(
    ("given", "family"),
    [("glm4moe", "glm4_moe"), ("Glm4Moe", "glm4_moe"), ("qwen35moe", "qwen3_5_moe"), ("kimi-k2", "deepseek_v3")],
)
def test_names_with_and_without_underscores(given: str, family: str) -> None:
    assert family_of(given).name == family


def test_what_is_refused_at_the_start_is_what_has_no_map() -> None:
    """A name of the table that loads with another family's map (``kimi_k2``) counts for its own."""
    mapped = {name.removesuffix("_text") for family in FAMILIES for name in family.model_types}
    assert set(trained_families()) - mapped == set()
    assert mapped - set(trained_families()) == set()


def test_the_language_model_of_a_vision_language_checkpoint() -> None:
    text, whole = family_of("qwen3_5_moe_text"), family_of("qwen3_5_moe")
    name = "decoder.layers.3.mlp.experts.linear_fc1.weight7"
    rule, _ = text.find(name)
    assert rule.hf_names(3, 7) == [f"model.layers.3.mlp.experts.7.{x}_proj.weight" for x in ("gate", "up")]
    rule, _ = whole.find(name)
    assert rule.is_stacked
    assert rule.hf_names(3, 7) == ["model.language_model.layers.3.mlp.experts.gate_up_proj"]
    assert whole.find("output_layer.weight")[0].hf == ("lm_head.weight",)
    assert (text.embedding, whole.embedding) == (
        "model.embed_tokens.weight",
        "model.language_model.embed_tokens.weight",
    )


def _checkpoint(folder: Path, names: list[str], **config: object) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 2, **config}))
    for i, name in enumerate(names):
        save_file({name: torch.full((2,), float(i))}, folder / f"{i}.safetensors")
    return folder


@pytest.mark.parametrize(
    ("model_type", "name", "carried"),
    [
        ("deepseek_v3", "model.layers.2.mlp.gate.weight", True),
        ("deepseek_v3", "model.layers.3.mlp.gate.weight", False),  # there is one such layer
        ("deepseek_v3", "model.layers.1.mlp.gate.weight", False),
        ("glm4_moe", "model.layers.2.eh_proj.weight", True),
        ("qwen2", "model.layers.2.mlp.up_proj.weight", False),
        ("mimo", "model.mtp_layers.0.input_proj.weight", True),
        ("qwen3_5", "model.visual.blocks.0.attn.qkv.weight", True),
        ("qwen3_vl", "model.visual.merger.norm.weight", True),
        ("qwen2_5_vl", "visual.merger.mlp.0.weight", True),
        ("qwen2_5_vl", "model.layers.0.mlp.up_proj.weight", False),
        ("qwen3_next", "mtp.fc.weight", True),
    ],
)
def test_what_is_carried(model_type: str, name: str, carried: bool, tmp_path: Path) -> None:
    path = _checkpoint(tmp_path / "source", [name], num_nextn_predict_layers=1)
    with HfCheckpoint(path) as checkpoint:
        assert (name in carried_names(checkpoint, family_of(model_type))) == carried


def test_carried_tensors_are_copied_once(tmp_path: Path) -> None:
    names = ["mtp.fc.weight", "model.norm.weight", "model.visual.norm.weight"]
    source, target = _checkpoint(tmp_path / "source", names), tmp_path / "target"
    target.mkdir()
    files, size = write_carried(source, target, family_of("qwen3_5"), written=["mtp.fc.weight"])
    assert files == {"model.visual.norm.weight": "carried-00001.safetensors"}
    assert size == 8
    with HfCheckpoint(target) as checkpoint:
        assert checkpoint.slice("model.visual.norm.weight")[:].tolist() == [2.0, 2.0]
