"""Families that only the package mbridge has; ``tests/integration/test_mbridge.py`` asks it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.arguments import ArgumentError, parse_args
from slime.models import bridges
from slime.models.facts import trained_families
from tests.support.arguments import CONFIG, minimal_flags

MIXTRAL = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Answer in the place of mbridge that it has a problem; return the configs that it was asked about."""
    configs: list[dict[str, Any]] = []

    def answer(config: str) -> dict[str, Any]:
        configs.append(json.loads(config))
        return {"problem": "its norms are of another kind"}

    monkeypatch.setattr(bridges, "_asked", answer)
    bridges.bridged_families.cache_clear()
    yield configs
    bridges.bridged_families.cache_clear()


def refused(tmp_path: Path, **config: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    words = minimal_flags()[: minimal_flags().index("--num-layers")]
    with pytest.raises(ArgumentError) as error:
        parse_args([*words, "--hf-checkpoint", str(tmp_path)])
    return str(error.value)


def test_without_mbridge_the_families_that_work_are_listed(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "mbridge" else find_spec(name, *more)
    )
    message = refused(tmp_path, **MIXTRAL)
    assert "model_type mixtral, which slime does not train (architectures MixtralForCausalLM); it trains" in message
    assert f"{', '.join(trained_families())}, and further ones where the package mbridge is installed" in message
    assert not asked


def test_with_mbridge_its_language_models_are_listed_too(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    names = bridges.bridged_families()
    assert {"mixtral", "qwen3", "llama"} <= set(names)
    assert not {"gemma3", "qwen2_5_vl", "internvl_chat"} & set(names)  # they are more than a language model
    message = refused(tmp_path, model_type="mistral", architectures=["MistralForCausalLM"])
    assert "model_type mistral, which slime does not train (architectures MistralForCausalLM); it trains" in message
    assert ", minimax_m2, mixtral, qwen2, " in message
    assert "further ones" not in message
    assert not asked  # asking it takes seconds


def test_a_model_that_flags_cannot_describe_is_refused_with_the_reason(
    asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    message = refused(tmp_path, **MIXTRAL)
    assert "(architectures MixtralForCausalLM); its norms are of another kind; it trains" in message
    assert "mixtral, qwen2" not in message
    assert {config["model_type"] for config in asked} == {"mixtral"}


def test_what_mbridge_describes_is_trained_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = {"bridge": "MixtralBridge", "qk_layernorm": False, "qkv_bias": False, "router": "softmax"}
    answer = {"megatron": {**section, "run": ["--moe-router-topk-scaling-factor", 2.5]}}
    monkeypatch.setattr(bridges, "_asked", lambda config: answer)
    more = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **MIXTRAL, **more}))
    words = minimal_flags()[: minimal_flags().index("--num-layers")]
    args = parse_args([*words, "--hf-checkpoint", str(tmp_path)])
    assert (args.num_experts, args.moe_router_topk, args.moe_ffn_hidden_size) == (4, 2, CONFIG["intermediate_size"])
    assert args.moe_router_topk_scaling_factor == 2.5
    assert args.swiglu
    assert not args.moe_router_pre_softmax
    assert "the family mixtral is described by MixtralBridge of mbridge; docs" in capsys.readouterr().err


def test_families_of_the_table_are_not_asked_about(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    parse_args([*minimal_flags(), "--hf-checkpoint", str(tmp_path)])
    assert not asked


def test_an_mbridge_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridges, "DESCRIBE", "slime.models.no_such_module")
    answer = bridges.bridged_settings({"model_type": "mixtral", "vocab_size": 11})
    assert answer["problem"].startswith("mbridge cannot describe it: ")
    assert "no_such_module" in answer["problem"]
