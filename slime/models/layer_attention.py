"""Softmax attention that differs from layer to layer (Gemma 3 and 4, gpt-oss): windows, heads, rotary frequencies.

No Megatron flag describes these; they are read from ``config.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from slime.models import hf_fields

Config = dict[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"
ACTIVATION = "gelu_pytorch_tanh"
GPT_OSS = "gpt_oss"


class Rotary(NamedTuple):
    """Rotary frequencies of a layer: ``base ** (-2 i / head_dim) / factor`` for ``i < turning``, and 0 after them."""

    base: float
    turning: int
    factor: float


class LayerAttention(NamedTuple):
    """The attention of one layer.

    ``window``: how many tokens a query sees at most, its own included; None for all before it. ``keys_are_values``:
    values are the keys before their norm, and no weights of the layer are for values. ``rotary``: None where all layers
    have the frequencies of the model.
    """

    window: int | None
    groups: int
    head_dim: int
    keys_are_values: bool
    rotary: Rotary | None


def layer_attention(config: Config) -> tuple[LayerAttention, ...]:
    """Return one entry per layer of the text model ``config``; () for families whose layers are alike."""
    if config.get("model_type") not in hf_fields.LAYERS_DIFFER:
        return ()
    by_kind = {kind: _of_kind(config, kind) for kind in (SLIDING, FULL)}
    kinds = config.get("layer_types") or _kinds(config)
    return tuple(by_kind[kind] for kind in kinds)


def config_and_layers(checkpoint: str, layers: int) -> tuple[Config, tuple[LayerAttention, ...]]:
    """Return the text part of the checkpoint's ``config.json`` and its layers, of which there are to be ``layers``.

    Raises ValueError for another number, and for what is not built.
    """
    path = Path(checkpoint) / "config.json"
    config = hf_fields.text_part(json.loads(path.read_text()))
    found = layer_attention(config)
    if len(found) != layers:
        raise ValueError(f"{path} has {len(found)} layers of these families, --num-layers is {layers}")
    if problem := not_built(config):
        raise ValueError(f"{path} has {problem}, which slime does not build")
    return config, found


def _kinds(config: Config) -> list[str]:
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    layers = int(config.get("num_hidden_layers") or 0)
    return [FULL if (i + 1) % every == 0 else SLIDING for i in range(layers)]


def _of_kind(config: Config, kind: str) -> LayerAttention:
    groups, dim, sliding = int(config["num_key_value_heads"]), int(config["head_dim"]), kind == SLIDING
    shared = not sliding and bool(config.get("attention_k_eq_v"))
    if not sliding:
        dim = int(config.get("global_head_dim") or dim)
    if shared:
        groups = int(config.get("num_global_key_value_heads") or groups)
    window = int(config["sliding_window"]) if sliding else None
    rotary = None if config["model_type"] == GPT_OSS else _rotary(config, kind, dim)
    return LayerAttention(window, groups, dim, shared, rotary)


def _rotary(config: Config, kind: str, dim: int) -> Rotary:
    found = _rope(config, kind)
    stretched = found["rope_type"] != "default"
    turning = int(found.get("partial_rotary_factor", 1.0) * dim // 2)
    return Rotary(float(found["rope_theta"]), turning, float(found.get("factor", 1.0)) if stretched else 1.0)


def _rope(config: Config, kind: str) -> Config:
    """Return ``rope_parameters`` of a kind of layer, with its ``rope_type``; transformers 4 has a base for either."""
    stated = config.get("rope_parameters") or {}
    if kind in stated:
        found = dict(stated[kind])
    elif kind == SLIDING:
        found = {"rope_theta": config["rope_local_base_freq"]}
    else:
        found = {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}
    return {**found, "rope_type": found.get("rope_type", found.get("type", "default"))}


def yarn(config: Config) -> dict[str, Any]:
    """Return the attributes of Megatron's configuration that its rotary embedding with YaRN reads."""
    stated = config.get("rope_parameters") or config["rope_scaling"]
    return {
        "yarn_rotary_scaling_factor": float(stated["factor"]),
        "yarn_original_max_position_embeddings": int(stated["original_max_position_embeddings"]),
        "yarn_beta_fast": float(stated.get("beta_fast") or 32.0),
        "yarn_beta_slow": float(stated.get("beta_slow") or 1.0),
        "yarn_mscale": None,
        "yarn_mscale_all_dim": None,
        "yarn_correction_range_round_to_int": bool(stated.get("truncate", True)),
    }


def shared_heads(layers: Iterable[LayerAttention]) -> tuple[int, int]:
    """Return key heads, and size per head, of the layers whose values are their keys; (0, 0) without such layers."""
    return next(((layer.groups, layer.head_dim) for layer in layers if layer.keys_are_values), (0, 0))


def not_built(config: Config) -> str | None:
    """Return what a model of these families has that slime does not build; None where it builds it."""
    if config.get("model_type") not in hf_fields.LAYERS_DIFFER:
        return None
    if config["model_type"] == GPT_OSS:
        return _gpt_oss_not_built(config)
    has, own_values = config.get, not config.get("attention_k_eq_v")
    kinds = {_rope(config, kind)["rope_type"] for kind in (SLIDING, FULL)} - {"default", "linear", "proportional"}
    activation = has("hidden_activation", ACTIVATION)
    reasons = (
        (
            has("hidden_size_per_layer_input"),
            "embeddings for every layer (hidden_size_per_layer_input), as Gemma 4 E2B and E4B",
        ),
        (
            has("num_kv_shared_layers"),
            "layers that share keys and values (num_kv_shared_layers), as Gemma 4 E2B and E4B",
        ),
        (
            has("global_head_dim") and own_values,
            "values of their own in layers with heads of another size (attention_k_eq_v false)",
        ),
        (
            has("use_bidirectional_attention") in (True, "all"),
            "attention in both directions (use_bidirectional_attention), as EmbeddingGemma",
        ),
        (has("attn_logit_softcapping"), "capped attention scores (attn_logit_softcapping)"),
        (has("attention_bias"), "biases in attention (attention_bias)"),
        (activation != ACTIVATION, f"the activation {activation} (hidden_activation)"),
        (kinds, f"rotary embeddings of the type {', '.join(sorted(kinds))}"),
    )
    return next((what for found, what in reasons if found), None)


def _gpt_oss_not_built(config: Config) -> str | None:
    quantization = (config.get("quantization_config") or {}).get("quant_method")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    reasons = (
        (
            quantization is not None,
            f"weights in {str(quantization).upper()} (quantization_config), which `python -m tools.convert to-bf16` "
            "makes the bf16 that trainers load",
        ),
        (kind != "yarn", f"rotary embeddings of the type {kind}"),
        (rope.get("attention_factor") is not None or rope.get("mscale"), "an explicit attention factor (YaRN)"),
        (not config.get("attention_bias", True), "no biases in attention (attention_bias false)"),
        (config.get("hidden_act", "silu") != "silu", f"the activation {config.get('hidden_act')} (hidden_act)"),
    )
    return next((what for found, what in reasons if found), None)
