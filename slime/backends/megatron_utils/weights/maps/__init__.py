"""The weight maps, one module per model family, found by ``model_type`` of the checkpoint's ``config.json``."""

from __future__ import annotations

from slime.backends.megatron_utils.weights.maps import llama, qwen2, qwen2_moe, qwen3, qwen3_moe
from slime.backends.megatron_utils.weights.maps.rule import Family, Rule

__all__ = ["FAMILIES", "Family", "Rule", "family_of"]

FAMILIES: tuple[Family, ...] = (
    qwen2.FAMILY,
    qwen2_moe.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    llama.FAMILY,
)


def family_of(model_type: str) -> Family:
    """Return the family of a ``model_type``. Raises ValueError listing the known ones."""
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = sorted(name for family in FAMILIES for name in family.model_types)
    raise ValueError(f"no weight map for model_type {model_type!r}; there are maps for {known}")
