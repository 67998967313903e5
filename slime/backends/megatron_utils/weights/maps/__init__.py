"""The weight maps of the model families, found by ``model_type`` of the checkpoint's ``config.json``."""

from __future__ import annotations

from slime.backends.megatron_utils.weights.maps import deepseek_v3, families, glm4, gpt_oss, qwen3_5, vision
from slime.backends.megatron_utils.weights.maps.bridged import bridged_family
from slime.backends.megatron_utils.weights.maps.rule import Family, Rule
from slime.models.bridges import bridged_families

__all__ = ["FAMILIES", "Family", "Rule", "family_of"]

FAMILIES: tuple[Family, ...] = (
    families.QWEN2,
    families.QWEN2_MOE,
    families.QWEN3,
    families.QWEN3_MOE,
    families.LLAMA,
    deepseek_v3.FAMILY,
    deepseek_v3.SPARSE,
    glm4.FAMILY,
    families.GLM4_MOE,
    families.MIMO,
    families.MINIMAX_M2,
    families.QWEN3_NEXT,
    *qwen3_5.FAMILIES,
    families.GEMMA3,
    families.GEMMA4,
    gpt_oss.FAMILY,
    vision.QWEN3_VL,
    vision.QWEN3_VL_MOE,
    vision.QWEN2_5_VL,
    vision.GEMMA3,
    vision.GEMMA4,
    vision.KIMI_K25,
)


def family_of(model_type: str) -> Family:
    """Return the family of a ``model_type``, written with or without ``_`` and ``-``.

    One without a map here is looked for in mbridge, where that is installed. Raises ValueError for another one, listing
    those there are.
    """
    wanted = _squashed(model_type)
    for family in FAMILIES:
        if any(_squashed(name) == wanted for name in family.model_types):
            return family
    for name in bridged_families():
        if _squashed(name) == wanted:
            return bridged_family(name)
    known = sorted({*bridged_families(), *(name for family in FAMILIES for name in family.model_types)})
    raise ValueError(f"no weight map for model_type {model_type!r}; there are maps for {known}")


def _squashed(model_type: str) -> str:
    return model_type.lower().replace("_", "").replace("-", "")
