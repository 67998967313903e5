"""The table of models against what can be counted: transformers builds every model from it, on no device."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.models.facts import Model, models
from slime.models.megatron_flags import describe, megatron_flags

# transformers has no class of a language model for these; theirs has the same layers.
CLASS_OF = {
    "kimi_k2": "deepseek_v3", "mimo": "qwen2",
    "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe", "qwen2_5_vl_text": "qwen2",
}  # fmt: skip
# The total that a model's publisher puts in its name, in billions.
NAMES_WITH_TOTAL = {name: float(m[1]) for name in models() if (m := re.search(r"-(\d+(?:\.\d+)?)B", name))}


def transformers_config(model: Model) -> Any:
    """The configuration object of ``model``, made from the table."""
    from transformers import CONFIG_MAPPING

    fields = dict(model.config)
    name = fields.pop("model_type")
    rope = {"rope_type": "default", **fields.pop("rope_scaling", {}), "rope_theta": float(fields.pop("rope_theta"))}
    rope["rope_type"] = rope.pop("type", rope["rope_type"])
    if "rotary_dim" in fields:
        rope["partial_rotary_factor"] = fields.pop("rotary_dim") / fields["head_dim"]
    if "partial_rotary_factor" in fields:
        rope["partial_rotary_factor"] = fields.pop("partial_rotary_factor")
    return CONFIG_MAPPING[CLASS_OF.get(name, name)](**fields, rope_parameters=rope)


@pytest.mark.parametrize("name", [name for name, model in models().items() if model.parameters])
def test_total_parameters(name):
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(transformers_config(models()[name]))
    counted = sum(parameter.numel() for parameter in network.parameters()) / 1e9
    stated = models()[name].parameters
    digits = len(str(stated).partition(".")[2])
    assert round(counted, digits) == stated
    if name in NAMES_WITH_TOTAL:
        assert counted == pytest.approx(NAMES_WITH_TOTAL[name], rel=0.1)


@pytest.mark.parametrize(
    "name", [name for name, model in models().items() if model.config["model_type"] not in CLASS_OF]
)
def test_a_saved_config_gives_the_same_flags_as_the_table(name, tmp_path):
    model = models()[name]
    transformers_config(model).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert megatron_flags(saved) == megatron_flags(model.config)


@pytest.mark.parametrize("name", ["qwen3.5-27B", "qwen3.5-35B-A3B"])
def test_a_vision_language_config_gives_the_flags_of_its_text_part(name, tmp_path):
    from transformers import CONFIG_MAPPING

    text = transformers_config(models()[name])
    CONFIG_MAPPING[text.model_type.removesuffix("_text")](text_config=text.to_dict()).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "hidden_size" not in saved
    assert megatron_flags(saved) == megatron_flags(models()[name].config)


def test_values_have_the_types_they_look_like():
    """YAML reads 1e-6 as text; only 1.0e-6 is a number."""
    for model in models().values():
        for key, value in model.config.items():
            is_text = isinstance(value, str)
            assert is_text == (key in ("model_type", "scoring_func")), f"{model.script}: {key} is {value!r}"


def test_no_repository_appears_twice():
    names = [n for m in models().values() for n in (*m.repositories, *m.variants, *m.local_names)]
    assert sorted(set(names)) == sorted(names)


def test_every_model_has_repositories_or_is_like_one_that_has():
    assert all(m.repositories or models()[m.like].repositories for m in models().values())


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma2", "hidden_size": 8, "num_hidden_layers": 3, "head_dim": 4, "rms_norm_eps": 1e-6},
        {"model_type": "deepseek_v4", "kv_lora_rank": 512, "qk_nope_head_dim": 128, "n_routed_experts": 256},
    ],
)
def test_of_an_unknown_family_only_numbers_are_said(config):
    description = describe(config)
    said = {flag.option for flag in description.flags if flag.words()}
    assert said <= {
        "--num-layers", "--hidden-size", "--kv-channels", "--norm-epsilon", "--multi-latent-attention",
        "--kv-lora-rank", "--qk-head-dim", "--rotary-scaling-factor", "--num-experts",
    }  # fmt: skip
    assert description.notes == (
        f"the family {config['model_type']} is not known: activation, biases, norms, the kind of position embedding "
        "and, with experts, the router are for you to describe",
    )


def test_llama_3_scaling_with_other_bounds_is_named():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}
    (note,) = describe({**models()["llama3.1-8B-Instruct"].config, "rope_scaling": scaling}).notes
    assert "low_freq_factor 2.0" in note
    assert "Megatron's has low_freq_factor 1," in note


def test_layers_may_be_dense_in_any_pattern():
    config = {**models()["qwen3-30B-A3B"].config, "num_hidden_layers": 6}
    for changes, layers in (
        ({"decoder_sparse_step": 2}, "[0]*1+[1]*1+[0]*1+[1]*1+[0]*1+[1]*1"),
        ({"mlp_only_layers": [0, 1]}, "[0]*2+[1]*4"),
        ({"mlp_layer_types": ["dense"] * 5 + ["sparse"]}, "[0]*5+[1]*1"),
    ):
        words = megatron_flags({**config, **changes})
        assert words[words.index("--moe-layer-freq") + 1] == layers


def test_a_router_that_does_not_normalize_scores_before_choosing():
    config = models()["qwen3-30B-A3B"].config
    assert "--moe-router-pre-softmax" not in megatron_flags(config)
    assert "--moe-router-pre-softmax" in megatron_flags({**config, "norm_topk_prob": False})


def test_a_dense_model_has_no_flags_of_experts():
    for model in models().values():
        words = megatron_flags(model.config)
        assert ("--num-experts" in words) == any(word.startswith("--moe-") for word in words), model.script


KEYS = sorted({key for model in models().values() for key in model.config} - {"model_type"} | {"text_config"})
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 9), st.floats(0, 2), st.text(max_size=3), st.lists(st.integers(0, 9)),
    st.fixed_dictionaries({"rope_type": st.sampled_from(["yarn", "llama3", "default", "linear"])}),
)  # fmt: skip


@given(st.sampled_from([m.script for m in models().values()]), st.dictionaries(st.sampled_from(KEYS), VALUES))
@settings(max_examples=300, deadline=None)
def test_a_config_with_strange_values_is_described_without_an_accident(name, changes):
    words = megatron_flags({**models()[name].config, **changes})
    assert all(isinstance(word, str) for word in words)
