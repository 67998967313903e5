"""Attention that differs from layer to layer: what configs of Gemma 3 and 4 say of it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.arguments import ArgumentError
from slime.models import hf_fields
from slime.models.facts import known_config
from slime.models.layer_attention import layer_attention, not_built, shared_heads
from slime.models.shape import logit_cap
from tests.support.arguments import parse, run_args

GEMMA3_4B: dict[str, Any] = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
}  # fmt: skip
"""As published: what is left out is what transformers assumes."""
DENSE: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
    "attention_k_eq_v": True, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}  # fmt: skip


def frequencies(config: Any, rotary: Any) -> dict[str, torch.Tensor]:
    module = rotary(config)
    return {kind: getattr(module, f"{kind}_inv_freq") for kind in ("sliding_attention", "full_attention")}


def check_against(config: Any, theirs: dict[str, torch.Tensor], text: dict[str, Any]) -> None:
    """Windows, heads and frequencies of every layer, as transformers has them."""
    from slime.backends.megatron_utils import import_megatron

    import_megatron()
    from slime.backends.megatron_utils.model.gemma import rotary_angles

    layers = layer_attention(text)
    assert len(layers) == config.num_hidden_layers
    for layer, kind in zip(layers, config.layer_types, strict=True):
        assert layer.window == (config.sliding_window if kind == "sliding_attention" else None)
        angles = rotary_angles(layer.rotary, layer.head_dim, 2, torch.device("cpu"))
        torch.testing.assert_close(angles[1, 0, 0, : layer.head_dim // 2], theirs[kind], rtol=1e-6, atol=0)


def test_gemma3_as_transformers_reads_it() -> None:
    from transformers import Gemma3TextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    config = Gemma3TextConfig(**GEMMA3_4B["text_config"])
    theirs = frequencies(config, Gemma3RotaryEmbedding)
    for text in (hf_fields.text_part(GEMMA3_4B), config.to_dict(), known_config("gemma-3-4b-it")):
        check_against(config, theirs, hf_fields.text_part(text))
    assert {(layer.groups, layer.head_dim) for layer in layer_attention(hf_fields.text_part(GEMMA3_4B))} == {(4, 256)}


def test_gemma4_as_transformers_reads_it() -> None:
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    config = Gemma4TextConfig(**DENSE)
    theirs = frequencies(config, Gemma4TextRotaryEmbedding)
    for text in (DENSE, config.to_dict(), {"model_type": "gemma4", "text_config": DENSE}):
        check_against(config, theirs, hf_fields.text_part(text))
    layers = layer_attention(hf_fields.text_part(DENSE))
    assert [layer.keys_are_values for layer in layers] == [False] * 5 + [True]
    assert shared_heads(layers) == (2, 512)
    assert (layers[0].groups, layers[0].head_dim) == (4, 256)


def test_other_families_have_layers_that_are_alike() -> None:
    assert layer_attention({"model_type": "qwen3", "sliding_window": 4, "num_hidden_layers": 2}) == ()
    assert shared_heads(()) == (0, 0)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size_per_layer_input": 256}, "E2B and E4B"),
    ({"num_kv_shared_layers": 2}, "E2B and E4B"),
    ({"attention_k_eq_v": False}, "attention_k_eq_v false"),
    ({"use_bidirectional_attention": "all"}, "both directions"),
    ({"attention_bias": True}, "biases in attention"),
    ({"hidden_activation": "silu"}, "the activation silu"),
    ({"rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), YARN)}, "of the type yarn"),
]


@pytest.mark.parametrize(("stated", "sentence"), REFUSED)
def test_what_is_not_built_is_refused(stated: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    assert not_built(hf_fields.text_part(DENSE)) is None
    assert not_built({"model_type": "qwen3", **stated}) is None
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, **stated}))
    with pytest.raises(ArgumentError, match=sentence):
        parse("--hf-checkpoint", tmp_path)


GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 64, "intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8,
    "vocab_size": 256, "rms_norm_eps": 1e-5, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
}  # fmt: skip


@pytest.mark.parametrize(
    ("stated", "sentence"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "in MXFP4 .* to-bf16"),
        ({"attention_bias": False}, "attention_bias false"),
        ({"hidden_act": "gelu"}, "the activation gelu"),
        ({"rope_scaling": None}, "of the type default"),
        ({"rope_scaling": {**GPT_OSS["rope_scaling"], "attention_factor": 1.5}}, "attention factor"),
    ],
)
def test_what_is_not_built_of_gpt_oss_is_refused(stated: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    assert not_built(hf_fields.text_part(GPT_OSS)) is None
    (tmp_path / "config.json").write_text(json.dumps({**GPT_OSS, **stated}))
    with pytest.raises(ArgumentError, match=sentence):
        parse("--hf-checkpoint", tmp_path)


def test_gpt_oss_has_a_window_in_every_second_layer() -> None:
    """The first has one, also where the config has no ``layer_types``."""
    from transformers import GptOssConfig

    config = GptOssConfig(**GPT_OSS).to_dict()
    for text in (GPT_OSS, config):
        assert [layer.window for layer in layer_attention(hf_fields.text_part(text))] == [8, None, 8, None]
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2


def test_published_models_without_the_towers_are_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3_4B))
    args = model_of(tmp_path)
    assert (args.num_attention_heads, args.num_query_groups, args.kv_channels, args.vocab_size) == (8, 4, 256, 262208)
    assert not args.untie_embeddings_and_output_weights
    assert args.apply_layernorm_1p
    assert args.spec == ["slime_plugins.models.gemma3", "get_gemma3_model_provider"]
    assert not [line for line in args.warnings if "rope_scaling" in line or "sliding_window" in line]


def model_of(path: Path, *flags: Any) -> Any:
    """Arguments of a run whose model flags are those of the checkpoint."""
    from slime.arguments.parse import resolve
    from tests.support.arguments import MODEL_FLAGS, known, minimal_flags

    words = minimal_flags()[: -len(MODEL_FLAGS)]
    return resolve([*words, "--hf-checkpoint", str(path), "--dry-run", *map(str, flags)], *known())


def test_windows_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3_4B))
    with pytest.raises(ArgumentError, match="--window-size is given"):
        model_of(tmp_path, "--window-size", "(1023,0)")


def test_logits_are_capped_where_the_spec_of_the_family_builds_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    own = {"hf_checkpoint": str(tmp_path)}
    assert logit_cap(run_args(spec=["slime_plugins.models.gemma4", "get_gemma4_model_provider"], **own)) == 30.0
    assert logit_cap(run_args(spec=["a_user", "model_that_caps_them"], **own)) is None
    assert logit_cap(run_args()) is None
