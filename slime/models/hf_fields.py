"""Read what a Hugging Face config says, whichever of its many spellings a family uses."""

from __future__ import annotations

from typing import Any

from slime.models.facts import defaults_of

Config = dict[str, Any]
LAYERS_DIFFER = ("gemma3_text", "gemma4_text", "gpt_oss")
"""Families whose layers differ in windows, heads and positions: see ``layer_attention``."""
OUTER = ("model_type", "architectures", "megatron", "vision_config", "image_token_id", "video_token_id")
"""Fields of a vision-language config beside its text part."""
TIED = "tie_word_embeddings"


def text_part(config: Config) -> Config:
    """The language model of a vision-language config, with the whole's type; any other config as it is.

    With what the family has where a config does not say (``defaults`` in the table of models).
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        defaults = defaults_of(config.get("model_type"))
        return {**defaults, **config} if defaults else config
    outer = {key: config[key] for key in OUTER if key in config}
    tied = {TIED: config[TIED]} if TIED in config else {}  # of the text part transformers reads another default
    defaults = defaults_of(text.get("model_type"))
    return {**defaults, **outer, **text, **tied, "whole_model_type": config.get("model_type")}


def rope_theta(config: Config) -> float | None:
    """The base of the rotary embedding; where layers differ, of those that attend to all tokens."""
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict):
        parameters = parameters.get("full_attention") or parameters
    theta = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    return config.get("rope_theta") if theta is None else theta


def rope_scaling(config: Config) -> Config | None:
    """Return how positions are stretched, with the kind under ``rope_type``; None when they are not.

    None too where layers differ, in which no flag says it.
    """
    if config.get("model_type") in LAYERS_DIFFER:
        return None
    found = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(found, dict):
        return None
    kind = found.get("rope_type", found.get("type", "default"))
    return None if kind in ("default", "mrope") else {**found, "rope_type": kind}


def partial_rotary_factor(config: Config) -> float | None:
    """The part of a head that is rotated; None when the config does not say."""
    parameters = config.get("rope_parameters")
    inside = parameters.get("partial_rotary_factor") if isinstance(parameters, dict) else None
    stated = config.get("partial_rotary_factor") if inside is None else inside
    rotated, head = _count(config, "rotary_dim"), _count(config, "head_dim")
    if stated is None and rotated and head:
        return rotated / head
    return float(stated) if isinstance(stated, int | float) else None


def sliding_window(config: Config) -> int:
    """The window of the layers that attend to the last tokens only; 0 when all layers attend to everything.

    Qwen configs state a window that ``use_sliding_window`` switches on; in others a stated window is in use.
    """
    kinds = config.get("layer_types")
    used = "sliding_attention" in kinds if isinstance(kinds, list) else config.get("use_sliding_window", True)
    return _count(config, "sliding_window") if used else 0


def is_latent(config: Config) -> bool:
    """Return True if attention is multi-head latent attention."""
    return config.get("kv_lora_rank") is not None


def selecting_layers(config: Config) -> list[bool]:
    """Return one entry per layer, True where the layer has an indexer; [] for models without sparse attention.

    The other layers use the selection of the last one before them that has one.
    """
    layers = _count(config, "num_hidden_layers")
    if not _count(config, "index_topk"):
        return []
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds:
        return [str(kind) in ("full", "F") for kind in kinds]
    every, first = _count(config, "index_topk_freq") or 1, config.get("index_skip_topk_offset")
    skipped = 2 if first is None else int(first)
    return [max(i - skipped + 1, 0) % every == 0 for i in range(layers)]


def interleaves_indexer(config: Config) -> bool:
    """Return True if the indexer rotates neighboring numbers together: GLM's does, unless the config says otherwise."""
    return bool(config.get("indexer_rope_interleave", config.get("model_type") == "glm_moe_dsa"))


def deepstack_layers(config: Config) -> int:
    """Return how many decoder layers, the first ones, a vision tower adds features after; ``config``: text or whole."""
    vision = config.get("vision_config")
    return len(vision.get("deepstack_visual_indexes") or ()) if isinstance(vision, dict) else 0


def mrope_section(config: Config) -> list[int] | None:
    """Return how many frequencies turn with time, height and width; None when positions have one number."""
    for key in ("rope_parameters", "rope_scaling"):
        found = config.get(key)
        if isinstance(found, dict) and found.get("mrope_section"):
            return [int(size) for size in found["mrope_section"]]
    return None


def experts(config: Config) -> tuple[str, int] | None:
    """The key and the number of routed experts; None for a dense model."""
    return _first(config, "n_routed_experts", "num_experts", "num_local_experts")


def expert_size(config: Config) -> tuple[str, int] | None:
    """The key and the intermediate size of one expert."""
    return _first(config, "moe_intermediate_size", "intermediate_size")


def top_k(config: Config) -> tuple[str, int] | None:
    """The key and the number of experts that a token passes."""
    return _first(config, "num_experts_per_tok", "top_k_experts")


def shared_size(config: Config) -> tuple[str, int]:
    """Return (source, intermediate size) of the shared experts, taken together; the size is 0 without any.

    Of Gemma 4 that is the MLP beside the experts.
    """
    if config.get("enable_moe_block"):
        return "intermediate_size", _count(config, "intermediate_size")
    for key in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if config.get(key) is not None:
            return key, _count(config, key)
    size = _count(config, "n_shared_experts") * _count(config, "moe_intermediate_size")
    return "n_shared_experts x moe_intermediate_size", size


def expert_layers(config: Config) -> list[int] | None:
    """One entry per layer, 1 where it has experts; None when the number of layers is not stated."""
    layers = _count(config, "num_hidden_layers")
    if layers == 0:
        return None
    kinds, only_dense = _list(config, "mlp_layer_types"), _list(config, "mlp_only_layers")
    if kinds:
        return [int(kind == "sparse") for kind in kinds]
    if config.get("first_k_dense_replace") is not None:
        dense = min(_count(config, "first_k_dense_replace"), layers)
        return [0] * dense + [1] * (layers - dense)
    step = _count(config, "decoder_sparse_step") or 1
    return [int((i + 1) % step == 0 and i not in only_dense) for i in range(layers)]


def _first(config: Config, *keys: str) -> tuple[str, int] | None:
    return next(((key, _count(config, key)) for key in keys if _count(config, key)), None)


def _count(config: Config, key: str) -> int:
    """A whole number; 0 where there is none, or a list with one per layer, which flags cannot say."""
    value = config.get(key)
    return max(value, 0) if isinstance(value, int) and not isinstance(value, bool) else 0


def _list(config: Config, key: str) -> list[Any]:
    value = config.get(key)
    return value if isinstance(value, list) else []
