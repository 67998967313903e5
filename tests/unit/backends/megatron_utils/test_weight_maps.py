from __future__ import annotations

from pathlib import Path

import pytest

from slime.backends.megatron_utils.weights.layouts import QueryKey, QueryKeyValue, RowParallel
from slime.backends.megatron_utils.weights.maps import FAMILIES, Family, Rule, family_of
from slime.backends.megatron_utils.weights.maps.rule import as_template
from slime.backends.megatron_utils.weights.naming import model_family
from slime.models.facts import families
from tests.support.arguments import run_args


def test_families_are_found_by_model_type() -> None:
    assert [family_of(name).name for name in ("qwen2", "qwen3", "llama")] == ["qwen2", "qwen3", "llama"]


def test_an_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'mamba'") as error:
        family_of("mamba")
    assert all(repr(name) in str(error.value) for family in FAMILIES for name in family.model_types)


def test_every_family_is_in_the_table_and_on_the_page_of_models() -> None:
    entries = families()
    mapped = {name for family in FAMILIES for name in family.model_types}
    on_page = {name: entry for name, entry in entries.items() if "page" in entry}
    assert {name.removesuffix("_text") for name in mapped} == {
        *(name.removesuffix("_text") for name in on_page),
        *(entry["below"] for entry in on_page.values() if "below" in entry),
    }


@pytest.mark.parametrize(
    ("name", "template", "layer", "expert"),
    [
        ("decoder.layers.12.mlp.linear_fc1.weight", "decoder.layers.{layer}.mlp.linear_fc1.weight", 12, None),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.{layer}.mlp.up_proj.weight", 0, None),
        ("model.norm.weight", "model.norm.weight", None, None),
        ("my_layers.3.weight", "my_layers.3.weight", None, None),
        ("model.mtp_layers.1.input_proj.weight", "model.mtp_layers.{layer}.input_proj.weight", 1, None),
        ("mtp.layers.0.transformer_layer.a", "mtp.layers.{layer}.transformer_layer.a", 0, None),
        ("layers.4.mlp.experts.31.up_proj.weight", "layers.{layer}.mlp.experts.{expert}.up_proj.weight", 4, 31),
        ("layers.4.mlp.experts.linear_fc1.weight31", "layers.{layer}.mlp.experts.linear_fc1.weight{expert}", 4, 31),
        ("experts.local_experts.0.linear_fc2.weight", "experts.local_experts.{expert}.linear_fc2.weight", None, 0),
        ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight", None, None),
    ],
)
def test_templates(name: str, template: str, layer: int | None, expert: int | None) -> None:
    assert as_template(name) == (template, layer, expert, None)


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("visual.blocks.12.attn.qkv.bias", "visual.blocks.{block}.attn.qkv.bias"),
        ("model.visual.blocks.12.norm1.weight", "model.visual.blocks.{block}.norm1.weight"),
        ("visual.deepstack_merger_list.12.norm.weight", "visual.deepstack_merger_list.{block}.norm.weight"),
    ],
)
def test_blocks_of_a_vision_tower_are_no_layers(name: str, template: str) -> None:
    assert as_template(name) == (template, None, None, 12)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_tensor_of_either_side_is_mapped_twice(family: Family) -> None:
    of_mtp = family.mtp.rules if family.mtp else ()
    numbered_on = family.mtp is not None and family.mtp.pattern is None
    for side in ("megatron", "hf"):
        # In layers whose values are their keys the same projections make another parameter.
        rules = [rule for rule in family.rules if side == "megatron" or not isinstance(rule.layout, QueryKey)]
        names = [name for rule in rules for name in getattr(rule, side)]
        own = [name for rule in of_mtp for name in getattr(rule, side)]
        assert len(names) == len(set(names))
        assert len(own) == len(set(own))
        # A layer that is numbered on after the last one has the same names, with a number that no other layer has.
        assert (side == "hf" and numbered_on) or not set(own) & set(names)


def test_local_and_transformer_engine_names_meet_in_one_rule() -> None:
    family = family_of("qwen3")
    own = family.find("decoder.layers.4.input_layernorm.weight")
    fused = family.find("decoder.layers.4.self_attention.linear_qkv.layer_norm_weight")
    assert own[0] is fused[0]
    assert own[0].hf_names(4) == ["model.layers.4.input_layernorm.weight"]
    assert family.find("decoder.layers.4.mlp.linear_fc1.layer_norm_weight")[0].hf_names(4) == [
        "model.layers.4.post_attention_layernorm.weight"
    ]


def test_qkv_is_three_tensors_in_order() -> None:
    rule, place = family_of("qwen2").find("decoder.layers.1.self_attention.linear_qkv.bias")
    assert place.layer == 1
    assert rule.hf_names(1) == [f"model.layers.1.self_attn.{x}_proj.bias" for x in "qkv"]
    assert isinstance(rule.layout, QueryKeyValue)


@pytest.mark.parametrize("name", ["linear_fc1.weight17", "local_experts.17.linear_fc1.weight"])
def test_grouped_and_sequential_experts_meet_in_one_rule(name: str) -> None:
    rule, place = family_of("qwen3_moe").find(f"decoder.layers.3.mlp.experts.{name}")
    assert (place.layer, place.expert) == (3, 17)
    assert rule.is_expert
    assert not rule.is_stacked
    assert rule.hf_names(3, 17) == [f"model.layers.3.mlp.experts.17.{x}_proj.weight" for x in ("gate", "up")]


def test_what_every_token_passes_is_not_split_over_expert_ranks() -> None:
    family = family_of("qwen2_moe")
    for name in ("router.weight", "shared_experts.linear_fc2.weight", "shared_experts.gate_weight"):
        assert not family.find(f"decoder.layers.0.mlp.{name}")[0].is_expert


def test_tensors_that_stack_the_experts_of_a_layer() -> None:
    names = ("decoder.layers.{layer}.mlp.experts.linear_fc2.weight{expert}",)
    rule = Rule(names, ("model.layers.{layer}.mlp.experts.down_proj",), RowParallel())
    assert rule.is_stacked
    assert rule.hf_names(2, 5) == ["model.layers.2.mlp.experts.down_proj"]
    assert Family("stacked", ("stacked",), (rule,)).knows_hf("model.layers.7.mlp.experts.down_proj")


def test_a_parameter_without_a_rule_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'llama' has no rule.*q_layernorm"):
        family_of("llama").find("decoder.layers.0.self_attention.q_layernorm.weight")


def test_which_checkpoint_tensors_a_family_knows() -> None:
    family = family_of("llama")
    assert family.knows_hf("model.layers.99.mlp.up_proj.weight")
    assert not family.knows_hf("model.layers.0.self_attn.q_proj.bias")
    assert family.ignores_hf("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not family.ignores_hf("model.layers.0.self_attn.rotary_emb.weight")


def test_the_model_name_wins_over_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "a_new_llama"}')
    args = run_args(hf_checkpoint=str(tmp_path), model_name=None)
    with pytest.raises(ValueError, match="a_new_llama"):
        model_family(args)
    for given in ("llama", "LlamaConfig"):
        args.model_name = given
        assert model_family(args).name == "llama"
        assert model_family(args, tmp_path).name == "llama"
