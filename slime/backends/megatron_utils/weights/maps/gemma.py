"""Gemma 3 and dense Gemma 4: norms before and after attention and MLP; in Gemma 4 layers without values of their own.

Published ones but the smallest hold a vision-language model, of which the language model is trained.
"""

from __future__ import annotations

from dataclasses import replace

from slime.backends.megatron_utils.weights.layouts import QueryKey, Replicated
from slime.backends.megatron_utils.weights.maps.parts import DENSE, QK_NORM, ROTARY_BUFFERS, layer_rule
from slime.backends.megatron_utils.weights.maps.rule import Family, Rule
from slime.backends.megatron_utils.weights.maps.vision import below_language_model

_NORMS = {
    "post_self_attn_layernorm.weight": "post_attention_layernorm.weight",
    "post_mlp_layernorm.weight": "post_feedforward_layernorm.weight",
}
GEMMA3: tuple[Rule, ...] = (
    *(rule for rule in DENSE if "pre_mlp_layernorm" not in rule.megatron[0]),
    *QK_NORM,
    layer_rule(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("pre_feedforward_layernorm.weight",),
        Replicated(),
    ),
    *(layer_rule(megatron, (hf,), Replicated()) for megatron, hf in _NORMS.items()),
)
_SHARED = "self_attention.linear_qk."
"""Of queries and keys, in layers whose values are their keys."""
GEMMA4: tuple[Rule, ...] = (
    *(rule for rule in GEMMA3 if "input_layernorm" not in rule.megatron[0]),
    layer_rule(
        (
            "input_layernorm.weight",
            "self_attention.linear_qkv.layer_norm_weight",
            f"{_SHARED}layer_norm_weight",
        ),
        ("input_layernorm.weight",),
        Replicated(),
    ),
    layer_rule(f"{_SHARED}weight", ("self_attn.q_proj.weight", "self_attn.k_proj.weight"), QueryKey()),
    layer_rule("layer_scalar", ("layer_scalar",), Replicated()),
)
_GEMMA3_WHOLE = tuple(
    replace(rule, hf=tuple(name.replace("model.", "language_model.model.", 1) for name in rule.hf)) for rule in GEMMA3
)

FAMILIES = (
    Family("gemma3_text", ("gemma3_text",), GEMMA3, ROTARY_BUFFERS),
    Family(
        "gemma3", ("gemma3",), _GEMMA3_WHOLE, ROTARY_BUFFERS, carried=(r"^vision_tower\.", r"^multi_modal_projector\.")
    ),
    Family("gemma4_text", ("gemma4_text",), GEMMA4, ROTARY_BUFFERS),
    Family(
        "gemma4",
        ("gemma4",),
        below_language_model(GEMMA4),
        ROTARY_BUFFERS,
        carried=(r"^model\.(vision_tower|embed_vision|audio_tower|embed_audio)\.",),
    ),
)
