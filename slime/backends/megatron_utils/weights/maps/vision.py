"""Vision-language models: a language model's rules, and those of the vision tower for a model that trains it.

Tower and checkpoint have the same names, those of transformers; every tensor-parallel rank holds the tower whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from slime.backends.megatron_utils.weights.layouts import Replicated, RowParallel, Transposed
from slime.backends.megatron_utils.weights.maps.deepseek_v3 import FAMILY as DEEPSEEK_V3
from slime.backends.megatron_utils.weights.maps.families import GEMMA3 as GEMMA3_TEXT
from slime.backends.megatron_utils.weights.maps.families import GEMMA4 as GEMMA4_TEXT
from slime.backends.megatron_utils.weights.maps.families import QWEN2, QWEN3
from slime.backends.megatron_utils.weights.maps.glm4 import FusedGateUp
from slime.backends.megatron_utils.weights.maps.parts import ROTARY_BUFFERS, router, stacked_experts
from slime.backends.megatron_utils.weights.maps.rule import Family, Rule

TOWER = "visual."
"""The beginning of the names of a tower's parameters."""
BELOW_MODEL = (r"^model\.visual\.",)

_BOTH = ("weight", "bias")
_BLOCK = "blocks.{block}."
_MERGER = ("norm", "linear_fc1", "linear_fc2")


def below_language_model(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return ``rules`` with the tensors of the language model below ``model.language_model``."""
    prefix = "model.language_model."
    return tuple(replace(rule, hf=tuple(name.replace("model.", prefix, 1) for name in rule.hf)) for rule in rules)


def tower_rules(prefix: str, modules: Iterable[str], weights: Iterable[str]) -> tuple[Rule, ...]:
    """Return the rules of a tower whose tensors are below ``prefix``: ``modules`` have a bias, ``weights`` none."""
    names = [f"{module}.{kind}" for module in modules for kind in _BOTH] + [f"{name}.weight" for name in weights]
    return tuple(Rule((TOWER + name,), (prefix + name,), Replicated()) for name in names)


# The tower of Qwen3-VL, and without the mergers of its inner layers that of Qwen3.5.
QWEN3_TOWER = tower_rules(
    "model.visual.",
    (
        "patch_embed.proj",
        *(_BLOCK + name for name in ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")),
        *(f"{merger}.{name}" for merger in ("merger", "deepstack_merger_list.{block}") for name in _MERGER),
    ),
    ("pos_embed",),
)
QWEN2_5_TOWER = tower_rules(
    "visual.",
    (
        *(_BLOCK + name for name in ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
        *("merger.mlp.0", "merger.mlp.2"),
    ),
    ("patch_embed.proj", _BLOCK + "norm1", _BLOCK + "norm2", "merger.ln_q"),
)

_QWEN3_VL_MOE = (*QWEN3.rules, router(), *stacked_experts(Transposed(FusedGateUp()), Transposed(RowParallel())))


def _below(name: str, rules: Iterable[Rule]) -> Family:
    return Family(name, (name,), below_language_model(rules), ROTARY_BUFFERS, carried=BELOW_MODEL, tower=QWEN3_TOWER)


QWEN3_VL = _below("qwen3_vl", QWEN3.rules)
# Its experts are stored for products from the left: [experts, inputs, outputs].
QWEN3_VL_MOE = _below("qwen3_vl_moe", _QWEN3_VL_MOE)
QWEN2_5_VL = Family(
    "qwen2_5_vl", ("qwen2_5_vl",), QWEN2.rules, ROTARY_BUFFERS, carried=(r"^visual\.",), tower=QWEN2_5_TOWER
)

# Of these the language model alone is built.
GEMMA3 = Family(
    "gemma3",
    ("gemma3",),
    tuple(
        replace(rule, hf=tuple(name.replace("model.", "language_model.model.", 1) for name in rule.hf))
        for rule in GEMMA3_TEXT.rules
    ),
    ROTARY_BUFFERS,
    carried=(r"^vision_tower\.", r"^multi_modal_projector\."),
)
KIMI_K25 = Family(
    "kimi_k25",
    ("kimi_k25",),
    tuple(replace(rule, hf=tuple(f"language_model.{name}" for name in rule.hf)) for rule in DEEPSEEK_V3.rules),
    ROTARY_BUFFERS,
    carried=(r"^vision_tower\.", r"^mm_projector\."),
)
GEMMA4 = Family(
    "gemma4",
    ("gemma4",),
    below_language_model(GEMMA4_TEXT.rules),
    ROTARY_BUFFERS,
    carried=(r"^model\.(vision_tower|embed_vision|audio_tower|embed_audio)\.",),
)
