"""Say a Hugging Face config in Megatron's flags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from slime.models import hf_fields
from slime.models.facts import architecture, family_of, scaling_of

Config = dict[str, Any]

GROUPS = ("spec", "size", "norms", "attention", "positions", "vocabulary", "experts", "router", "run")
_LISTS = {"norms": "norms", "attention": "attention", "positions": "positions", "vocabulary": "vocabulary",
          "router_words": "router", "run": "run"}  # fmt: skip
# How experts are computed, not which: the same for every model.
_COMPUTATION: tuple[tuple[str, Any], ...] = (
    ("--moe-grouped-gemm", True),
    ("--moe-permute-fusion", True),
    ("--moe-token-dispatcher-type", "alltoall"),
)
_ROUTER_COMPUTATION: tuple[tuple[str, Any], ...] = (("--moe-router-dtype", "fp32"), ("--moe-aux-loss-coeff", 0))


@dataclass(frozen=True)
class ModelFlag:
    """``value``: True or False for a switch that is given or absent, None for a flag that must not have a value.

    ``key`` is the config key that says so, empty where the family alone decides; ``stated`` is what stands there when
    that is not the value itself. ``written``: the flag belongs on a command line (what equals Megatron's default may be
    left out). ``checked``: another value is another model, not another way to compute the same.
    """

    group: str
    option: str
    value: Any
    key: str = ""
    stated: str = ""
    written: bool = True
    checked: bool = True

    def words(self) -> list[str]:
        """The words of a command line."""
        if not self.written or self.value is None or self.value is False:
            return []
        if self.value is True:
            return [self.option]
        if self.option == "--moe-layer-freq":
            return [self.option, pattern(self.value)]
        values = self.value if isinstance(self.value, list) else [self.value]
        return [self.option, *map(plain, values)]


def plain(value: object) -> str:
    """A value as a user would type it: ``1e-6``, ``40`` for 40.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return re.sub(r"e([-+])0", r"e\1", str(value))


def pattern(layers: list[int]) -> str:
    """One entry per layer, shortened: ``[0]*3+[1]*58``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][0] == layer:
            runs[-1][1] += 1
        else:
            runs.append([layer, 1])
    return "+".join(f"[{layer}]*{count}" for layer, count in runs)


@dataclass(frozen=True)
class Description:
    """The flags of a model in the order in which they are written, and what flags could not say (whole sentences)."""

    flags: tuple[ModelFlag, ...]
    notes: tuple[str, ...]
    specs: tuple[list[str], ...]
    """Layer specifications that build this architecture; empty where Megatron's own does or none is known."""

    def words(self) -> list[str]:
        """The flags as the words of a command line."""
        return [word for flag in self.flags for word in flag.words()]


def megatron_flags(config: Config) -> list[str]:
    """The Megatron command-line words for ``config``, the content of a ``config.json`` or of the table of models.

    Of a family that is not in the table only what the config says in numbers is returned; see ``describe``.
    """
    return describe(config).words()


def describe(config: Config) -> Description:
    """The flags for ``config``, each with the config key it comes from, and notes about what they leave open.

    ``config["megatron"]``, where it is given, replaces what the table says of the family.
    """
    text = hf_fields.text_part(config)
    family = text.get("megatron") or family_of(text)
    flags = [
        *_size_flags(text, family),
        *_norm_flags(text, family),
        *(_latent_flags(text, family) if hf_fields.is_latent(text) else _attention_flags(text, family)),
        *_position_flags(text, family),
        *_vocabulary_flags(text, family),
        *_expert_flags(text, family),
        *(_family_flags(text, family) if family is not None else ()),
    ]
    specs = [] if family is None or "spec" not in family else [family["spec"], *family.get("also_specs", ())]
    if specs:
        flags.append(ModelFlag("spec", "--spec", specs[0], checked=False))
    # No value is a statement too: the config's `null` rank, or what the family goes without.
    stated = {"q_lora_rank"}.intersection(text)
    flags = [flag for flag in flags if flag.value is not None or not flag.key or flag.key in stated]
    flags.sort(key=lambda flag: GROUPS.index(flag.group))
    return Description(tuple(flags), tuple(_notes(text, family)), tuple(specs))


def _size_flags(config: Config, family: Config | None) -> Iterator[ModelFlag]:
    yield ModelFlag("size", "--num-layers", config.get("num_hidden_layers"), "num_hidden_layers")
    yield ModelFlag("size", "--hidden-size", config.get("hidden_size"), "hidden_size")
    layers = hf_fields.expert_layers(config) if hf_fields.experts(config) else None
    no_dense_layer = layers is not None and 0 not in layers
    ffn = config.get("intermediate_size")
    if ffn is None and no_dense_layer:
        ffn = config.get("moe_intermediate_size")  # no layer has this size; Megatron wants one
    yield ModelFlag("size", "--ffn-hidden-size", ffn, "intermediate_size", checked=not no_dense_layer)
    if family is not None:
        yield ModelFlag("size", "--swiglu", True)
        yield ModelFlag("size", "--disable-bias-linear", not family.get("linear_bias"))


def _norm_flags(config: Config, family: Config | None) -> Iterator[ModelFlag]:
    if family is not None:
        yield ModelFlag("norms", "--normalization", "RMSNorm")
    if config.get("rms_norm_eps") is not None:
        yield ModelFlag("norms", "--norm-epsilon", config["rms_norm_eps"], "rms_norm_eps")


def _attention_flags(config: Config, family: Config | None) -> Iterator[ModelFlag]:
    if family is not None:
        yield ModelFlag("attention", "--multi-latent-attention", False)
    yield ModelFlag("attention", "--num-attention-heads", config.get("num_attention_heads"), "num_attention_heads")
    groups = config.get("num_key_value_heads")
    if groups is not None:
        yield ModelFlag(
            group="attention",
            option="--group-query-attention",
            value=True,
            key="num_key_value_heads",
            stated=str(groups),
            checked=groups != config.get("num_attention_heads"),  # a group per head needs no switch
        )
        yield ModelFlag("attention", "--num-query-groups", groups, "num_key_value_heads")
    if config.get("head_dim") is not None:
        yield ModelFlag("attention", "--kv-channels", config["head_dim"], "head_dim")
    if family is not None:
        yield ModelFlag("attention", "--qk-layernorm", _has_qk_norm(config, family))
        yield ModelFlag("attention", "--add-qkv-bias", bool(family.get("qkv_bias") or config.get("attention_bias")))


def _latent_flags(config: Config, family: Config | None) -> Iterator[ModelFlag]:
    yield ModelFlag("attention", "--multi-latent-attention", True)
    yield ModelFlag("attention", "--num-attention-heads", config.get("num_attention_heads"), "num_attention_heads")
    for option, key in (
        ("--q-lora-rank", "q_lora_rank"),
        ("--kv-lora-rank", "kv_lora_rank"),
        ("--qk-head-dim", "qk_nope_head_dim"),
        ("--qk-pos-emb-head-dim", "qk_rope_head_dim"),
        ("--v-head-dim", "v_head_dim"),
    ):
        yield ModelFlag("attention", option, config.get(key), key)
    # Latent attention does not read it; without it Megatron wants a hidden size that the heads divide.
    channels = (family or {}).get("kv_channels", config.get("qk_nope_head_dim"))
    yield ModelFlag("attention", "--kv-channels", channels, checked=False)
    if family is not None:
        yield ModelFlag("attention", "--qk-layernorm", _has_qk_norm(config, family))


def _has_qk_norm(config: Config, family: Config) -> bool:
    stated = family["qk_layernorm"]
    return bool(config.get(stated)) if isinstance(stated, str) else bool(stated)


def _position_flags(config: Config, family: Config | None) -> Iterator[ModelFlag]:
    if family is not None:
        yield ModelFlag("positions", "--position-embedding-type", "rope")
    theta = hf_fields.rope_theta(config)
    if theta is not None:
        yield ModelFlag("positions", "--rotary-base", theta, "rope_theta")
    part = hf_fields.partial_rotary_factor(config)
    if hf_fields.is_latent(config):
        yield from _latent_position_flags(config)
        return
    if part is not None or family is not None:
        key = "partial_rotary_factor" if part is not None else ""
        yield ModelFlag("positions", "--rotary-percent", part or 1.0, key, written=(part or 1.0) != 1.0)
    scaling = hf_fields.rope_scaling(config) or {}
    llama3 = scaling.get("rope_type") == "llama3"
    if family is not None or llama3:
        yield ModelFlag("positions", "--use-rope-scaling", llama3)
    if llama3:
        yield ModelFlag("positions", "--rope-scaling-factor", scaling.get("factor"), "the factor of rope_scaling")


def _latent_position_flags(config: Config) -> Iterator[ModelFlag]:
    """YaRN, which with a factor of 1 is the plain rotary embedding."""
    scaling = hf_fields.rope_scaling(config) or {}
    if scaling.get("rope_type", "yarn") != "yarn":
        return
    yield ModelFlag("positions", "--rotary-scaling-factor", scaling.get("factor", 1), "the factor of rope_scaling")
    if not scaling:
        return
    yield ModelFlag("positions", "--rope-type", "yarn", "the rope_type of rope_scaling", written=False)
    for key in ("mscale", "mscale_all_dim"):
        if scaling.get(key) is not None:
            yield ModelFlag("positions", _option(key), scaling[key], f"{key} of rope_scaling")
    for key, default in scaling_of("yarn").items():
        value = scaling.get(key, default)
        yield ModelFlag("positions", _option(key), value, f"{key} of rope_scaling", written=value != default)


def _option(key: str) -> str:
    return "--" + key.replace("_", "-")


def _vocabulary_flags(config: Config, family: Config | None) -> Iterator[ModelFlag]:
    yield ModelFlag("vocabulary", "--vocab-size", config.get("vocab_size"), "vocab_size")
    tied = config.get("tie_word_embeddings")
    if tied is not None or family is not None:  # where a config of these families does not say, they are not tied
        yield ModelFlag(
            group="vocabulary",
            option="--untie-embeddings-and-output-weights",
            value=not tied,
            key="tie_word_embeddings",
            stated=str(tied).lower(),
            checked=tied is not None,
        )
    if (family or {}).get("max_position_embeddings") and config.get("max_position_embeddings"):
        length = config["max_position_embeddings"]
        yield ModelFlag("vocabulary", "--max-position-embeddings", length, checked=False)


def _expert_flags(config: Config, family: Config | None) -> Iterator[ModelFlag]:
    """Yield the flags of the experts and of their router; of a dense model only that there are none."""
    found = hf_fields.experts(config)
    if found is None:
        if family is not None:
            yield ModelFlag("experts", "--num-experts", None)
        return
    key, count = found
    yield ModelFlag("experts", "--num-experts", count, key)
    if (chosen := hf_fields.top_k(config)) is not None:
        yield ModelFlag("experts", "--moe-router-topk", chosen[1], chosen[0])
    size = hf_fields.expert_size(config)
    if size is not None:
        yield ModelFlag("experts", "--moe-ffn-hidden-size", size[1], size[0])
    shared_key, shared = hf_fields.shared_size(config)
    option = "--moe-shared-expert-intermediate-size"
    yield ModelFlag("experts", option, shared, shared_key, written=shared > 0)
    if family is None:
        return
    gated = bool(config.get("shared_expert_intermediate_size"))  # Qwen's shared expert has a gate, DeepSeek's none
    yield ModelFlag("experts", "--moe-shared-expert-gate", gated)
    layers = hf_fields.expert_layers(config)
    if layers is not None:
        keys = ("mlp_layer_types", "first_k_dense_replace", "decoder_sparse_step")
        stated = next((key for key in keys if config.get(key) is not None), "its layers")
        yield ModelFlag("experts", "--moe-layer-freq", layers, f"the pattern of {stated}")
    for option, value in _COMPUTATION:
        yield ModelFlag("experts", option, value, checked=False)
    if "router" in family:
        yield from _router_flags(config, family)


def _router_flags(config: Config, family: Config) -> Iterator[ModelFlag]:
    sigmoid = family["router"] == "sigmoid"
    yield ModelFlag("router", "--moe-router-score-function", family["router"])
    yield ModelFlag("router", "--moe-router-enable-expert-bias", sigmoid)
    # With softmax, weights that are not normalized again are those of a softmax over all experts.
    normalized = config.get("norm_topk_prob") is not False
    yield ModelFlag(
        group="router",
        option="--moe-router-pre-softmax",
        value=sigmoid or not normalized,
        key="norm_topk_prob" if "norm_topk_prob" in config else "",
        stated=str(normalized).lower(),
        checked=not sigmoid,
    )
    if isinstance(config.get("n_group"), int):
        # A single group limits nothing; the router of DeepSeek-V3 and its relatives is written with it all the same.
        written = config["n_group"] > 1 or config.get("model_type") in ("deepseek_v3", "deepseek_v32", "kimi_k2")
        yield ModelFlag("router", "--moe-router-num-groups", config["n_group"], "n_group", written=written)
        yield ModelFlag("router", "--moe-router-group-topk", config.get("topk_group"), "topk_group", written=written)
    scale = config.get("routed_scaling_factor")
    if scale is not None:
        option = "--moe-router-topk-scaling-factor"
        yield ModelFlag("router", option, scale, "routed_scaling_factor", written=scale != 1)
    for option, value in _ROUTER_COMPUTATION:
        yield ModelFlag("router", option, value, checked=False)


def _family_flags(config: Config, family: Config) -> Iterator[ModelFlag]:
    """The flags the table lists for the family, and the absence of the architectures it does not list."""
    listed = set()
    for name, group in _LISTS.items():
        if group == "router" and hf_fields.experts(config) is None:
            continue
        for option, value in _split(family.get(name, ())):
            listed.add(option)
            yield ModelFlag(group, option, value, checked=option in architecture())
    for option, group in architecture().items():
        if option not in listed:
            yield ModelFlag(group, option, False)


def _split(words: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    rest = list(words)
    while rest:
        option, values = rest.pop(0), []
        while rest and not str(rest[0]).startswith("--"):
            values.append(rest.pop(0))
        yield option, values or True


def _notes(config: Config, family: Config | None) -> Iterator[str]:
    name = config.get("model_type", "without a model_type")
    if family is None:
        yield (
            f"the family {name} is not known: activation, biases, norms, the kind of position embedding and, with "
            "experts, the router are for you to describe"
        )
    else:
        yield from _layer_notes(config)
        if "bridge" in family:
            yield (
                f"the family {name} is described by {family['bridge']} of mbridge; docs/en/reference/models.md says "
                "what of it is not checked"
            )
    scaling = hf_fields.rope_scaling(config)
    if scaling is None:
        return
    kind = scaling["rope_type"]
    if kind not in ("llama3", "yarn") or (kind == "yarn") != hf_fields.is_latent(config):
        yield f"its rope_scaling of the type {kind} has no flags"
    elif kind == "llama3" and any(scaling.get(key, value) != value for key, value in scaling_of("llama3").items()):
        given = ", ".join(f"{key} {scaling.get(key, value)}" for key, value in scaling_of("llama3").items())
        wanted = ", ".join(f"{key} {value}" for key, value in scaling_of("llama3").items())
        yield f"its rope_scaling has {given}; Megatron's has {wanted}"


def _layer_notes(config: Config) -> Iterator[str]:
    """Yield what a config may change in the layers of a known family, and what the flags compute instead."""
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        yield f"its hidden_act is {activation}, for which there are no flags; --swiglu computes silu"
    if config.get("mlp_bias"):
        yield "its mlp_bias is true, for which there are no flags; the MLPs are computed without biases"
    window = hf_fields.sliding_window(config)
    if window and config.get("model_type") not in hf_fields.LAYERS_DIFFER:
        yield (
            f"its sliding_window is {window}: without --window-size ({window - 1},0), and --window-attn-skip-freq "
            "where only some layers have it, the trainer attends to all tokens, so its log-probs differ from the "
            f"engines' in sequences of more than {window} tokens"
        )
