"""Sizes of models whose layers have heads and windows of their own, counted by transformers and by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.models.shape import model_shape
from slime.preflight.plan.memory_engine import engine_memory
from slime.preflight.plan.memory_trainer import Kept, layer_bytes
from slime.preflight.plan.model_size import Parallel, layer_weights, model_size
from tests.support.megatron_model import model_args
from tests.support.model_families import language_model, make_checkpoint

E, HEADS, DIM, GROUPS = 4, 4, 16, 2
"""The tiny models in fp32; layers without a window of ``gemma4`` have heads of 32, whose values are their keys."""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("WORLD_SIZE", "1")
    return lambda name, *flags: model_args(make_checkpoint(tmp_path, name), *flags)


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gemma4-whole", "gemma4_moe", "gpt_oss"])
def test_parameters_are_those_of_transformers(name: str, tiny: Any) -> None:
    args = tiny(name)
    expected = sum(p.numel() for p in language_model(args.hf_checkpoint, name).parameters())
    config = json.loads((Path(args.hf_checkpoint) / "config.json").read_text())
    assert model_size(args, config).total == expected


def test_weights_of_either_kind_of_layer(tiny: Any) -> None:
    shape = model_shape(tiny("gemma4"))
    sizes = []
    for kind in shape.kinds:
        sizes.append(sum(w.numel * w.count for w in layer_weights(shape, kind) if w.part == "attention"))
    hidden = 64
    assert sizes == [hidden * DIM * (2 * HEADS + 2 * GROUPS), hidden * 2 * DIM * (2 * HEADS + GROUPS)]


def test_activations_of_either_kind_of_layer(tiny: Any) -> None:
    shape = model_shape(tiny("gemma4"))
    found = [layer_bytes(shape, kind, Parallel(), Kept(element=E)) for kind in shape.kinds]
    unfused = layer_bytes(shape, shape.kinds[0], Parallel(), Kept(element=E, fused_activation=False))
    assert [one["mlp"] for one in found] == [unfused["mlp"]] * 2  # its gated GeLU has no kernel of Megatron's
    projected = [DIM * (HEADS + 2 * GROUPS), 2 * DIM * (HEADS + GROUPS)]
    rotated = [DIM * (HEADS + GROUPS), 2 * DIM * (HEADS + GROUPS)]
    assert [one["qkv"] for one in found] == [E * (p + r) for p, r in zip(projected, rotated, strict=True)]
    assert [one["context"] for one in found] == [E * HEADS * DIM, E * HEADS * 2 * DIM]


def test_cache_of_layers_with_and_without_a_window(tiny: Any) -> None:
    """SGLang has whole sequences of all layers of Gemma 3; of Gemma 4 and gpt-oss a second pool: 0.8 of the places."""
    for name, flags, expected in (
        ("gemma3", (), 2 * 2 * GROUPS * DIM),
        ("gemma4", (), 2 * (0.8 * GROUPS * DIM + GROUPS * 2 * DIM)),
        ("gemma4", ("--sglang-swa-full-tokens-ratio", 0.5), 2 * (0.5 * GROUPS * DIM + GROUPS * 2 * DIM)),
        ("gemma4", ("--sglang-disable-hybrid-swa-memory",), 2 * (GROUPS * DIM + GROUPS * 2 * DIM)),
        ("gemma4-whole", (), 2 * (0.8 * GROUPS * DIM + 2 * DIM)),
        ("gpt_oss", (), 2 * (0.8 * GROUPS * DIM + GROUPS * DIM)),
    ):
        args = tiny(name, "--sglang-kv-cache-dtype", "bf16", *flags)
        assert engine_memory(args, model_shape(args)).kv_per_token == pytest.approx(2 * expected)
