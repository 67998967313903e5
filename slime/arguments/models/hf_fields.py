"""Read what a Hugging Face config says, whichever of its many spellings a family uses."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def text_part(config: Config) -> Config:
    """The language model of a vision-language config; any other config as it is."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    outer = {key: config[key] for key in ("model_type", "tie_word_embeddings", "megatron") if key in config}
    return {**outer, **text}


def rope_theta(config: Config) -> float | None:
    """The base of the rotary embedding."""
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict) and "rope_theta" in parameters:
        return parameters["rope_theta"]
    return config.get("rope_theta")


def rope_scaling(config: Config) -> Config | None:
    """How positions are stretched, with its kind under ``rope_type``; None when they are not."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = found.get("rope_type", found.get("type", "default"))
    return None if kind in ("default", "mrope") else {**found, "rope_type": kind}


def partial_rotary_factor(config: Config) -> float | None:
    """The part of a head that is rotated; None when the config does not say."""
    inside = (config.get("rope_parameters") or {}).get("partial_rotary_factor")
    stated = inside if inside is not None else config.get("partial_rotary_factor")
    if stated is None and config.get("rotary_dim") and config.get("head_dim"):
        return float(config["rotary_dim"] / config["head_dim"])
    return None if stated is None else float(stated)


def is_latent(config: Config) -> bool:
    """Whether attention is multi-head latent attention."""
    return config.get("kv_lora_rank") is not None


def experts(config: Config) -> tuple[str, int] | None:
    """The key and the number of routed experts; None for a dense model."""
    for key in ("n_routed_experts", "num_experts", "num_local_experts"):
        if config.get(key):
            return key, int(config[key])
    return None


def expert_size(config: Config) -> tuple[str, int] | None:
    """The key and the intermediate size of one expert."""
    key = "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size"
    return (key, int(config[key])) if config.get(key) else None


def shared_size(config: Config) -> tuple[str, int]:
    """Where the intermediate size of the shared experts, taken together, comes from, and the size: 0 without any."""
    for key in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if config.get(key) is not None:
            return key, int(config[key])
    count, size = config.get("n_shared_experts") or 0, config.get("moe_intermediate_size") or 0
    return "n_shared_experts x moe_intermediate_size", int(count * size)


def expert_layers(config: Config) -> list[int] | None:
    """One entry per layer, 1 where it has experts; None when the number of layers is not stated."""
    layers = config.get("num_hidden_layers")
    if layers is None:
        return None
    if config.get("mlp_layer_types"):
        return [int(kind == "sparse") for kind in config["mlp_layer_types"]]
    if config.get("first_k_dense_replace") is not None:
        dense = min(config["first_k_dense_replace"], layers)
        return [0] * dense + [1] * (layers - dense)
    step, only_dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    return [int((i + 1) % step == 0 and i not in only_dense) for i in range(layers)]
