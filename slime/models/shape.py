"""The shape of a model: its sizes and what each layer is made of, derived once from Megatron's flags.

FLOPs, the memory estimate, Megatron's configuration and the weight layouts read their sizes here.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slime.models import hf_fields
from slime.models.facts import caps_logits, takes_images
from slime.models.layer_attention import LayerAttention, layer_attention
from slime.models.tower import Tower, tower_of

if TYPE_CHECKING:
    from slime.arguments.args import Args

DESCRIBED_BY = ("num_layers", "hidden_size", "num_attention_heads")
"""A command line with these, and the size of the vocabulary, describes the model itself."""


class LayerKind(NamedTuple):
    """A transformer layer: linear instead of softmax attention, experts instead of a dense MLP, an indexer.

    ``attention``: its softmax attention, where layers differ in it; None: that of the model.
    """

    linear: bool
    moe: bool
    indexer: bool = False
    attention: LayerAttention | None = None


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434): ranks, and sizes per head."""

    q_rank: int | None
    kv_rank: int
    qk_dim: int
    rope_dim: int
    v_dim: int

    @property
    def query_dim(self) -> int:
        """Size of a query or key of one head."""
        return self.qk_dim + self.rope_dim


@dataclass(frozen=True)
class LinearAttention:
    """Gated delta net (https://arxiv.org/abs/2412.06464): heads and sizes per head."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """Elements of a token's keys (and of its queries)."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of a token's values (and of their gate)."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class Indexer:
    """The part of sparse attention (DeepSeek-V3.2) that chooses the keys."""

    heads: int
    dim: int


@dataclass(frozen=True)
class Experts:
    """A mixture-of-experts layer. ``shared`` is the width of the shared experts, 0 without.

    ``beside``: the shared one is Gemma 4's MLP, which experts are beside, with norms of their own.
    """

    number: int
    top_k: int
    ffn: int
    shared: int
    shared_gate: bool
    latent: int | None
    bias: bool
    beside: bool = False


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a GPT model in Megatron's vocabulary. ``vocab`` is padded, ``vocab_unpadded`` the checkpoint's.

    ``fused_gate``: gated units can be fused, as SwiGLU is. ``qk_norm_whole``: all heads are normalized together, with a
    weight for each of them. ``sinks``: a number per head and layer.
    ``norm`` counts the vectors of a norm: 1 for RMSNorm, 2 for LayerNorm. ``positions`` are the rows of a learned
    position embedding. ``kinds`` has one entry per decoder layer. ``remarks`` say what the flags leave open.
    """

    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    vocab_unpadded: int
    kinds: tuple[LayerKind, ...]
    gated: bool = True
    fused_gate: bool = True
    untied: bool = True
    linear_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    sinks: bool = False
    norm: int = 1
    positions: int = 0
    output_gate: bool = False
    post_attention_norm: bool = False
    post_mlp_norm: bool = False
    latent: Latent | None = None
    experts: Experts | None = None
    linear: LinearAttention | None = None
    indexer: Indexer | None = None
    tower: Tower | None = None
    mtp: int = 0
    remarks: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        """Number of decoder layers, without those of multi-token prediction."""
        return len(self.kinds)

    def heads_of(self, kind: LayerKind) -> tuple[int, int, int]:
        """Return a layer's key heads, size per head, and projections beside that of queries: keys, or values too."""
        if kind.attention is None:
            return self.groups, self.head_dim, 2
        return kind.attention.groups, kind.attention.head_dim, 1 if kind.attention.keys_are_values else 2


def model_shape(args: Args) -> ModelShape:
    """Return the shape of the model that a run trains: ``shape_of`` with the config of ``args.hf_checkpoint``.

    Raises ValueError when the model is not described.
    """
    checkpoint = getattr(args, "hf_checkpoint", None)  # a caller of the public FLOPs function may have none
    return shape_of(args, _read_config(Path(checkpoint) / "config.json") if checkpoint else None)


def logit_cap(args: Args) -> float | None:
    """Return the ``c`` of logits ``c tanh(x / c)``, which the trainer applies where the family of ``--spec`` has it."""
    if not caps_logits(args.spec):
        return None
    config = dict(_read_config(Path(args.hf_checkpoint) / "config.json"))
    cap = hf_fields.text_part(config).get("final_logit_softcapping")
    return float(cap) if cap else None


OWN_LAYERS = ("gemma", "gpt_oss")
"""Parts of names of specifications whose layers differ in windows, and have gated units that are not SwiGLU."""


@lru_cache(maxsize=8)
def _read_config(path: Path) -> Mapping[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def shape_of(args: Args, hf_config: Mapping[str, Any] | None = None) -> ModelShape:
    """Return the shape that ``args`` describes; ``hf_config`` supplies what no Megatron flag describes.

    That is which layers of Qwen3-Next and Qwen3.5 have linear attention, the windows of gpt-oss, windows and heads of
    Gemma's layers, the indexer of sparse attention, and vision towers: their ``--spec`` reads them from the checkpoint.
    ``args`` may come from another parser: a missing attribute counts as not given. Raises ValueError when the model is
    not described.
    """
    missing = [name for name in DESCRIBED_BY if not getattr(args, name, None)]
    vocab = _get(args, "vocab_size") or _get(args, "padded_vocab_size")
    if missing or not vocab:
        raise ValueError(f"the model is not described: {', '.join(missing or ['vocab_size'])} missing")
    config = hf_fields.text_part(dict(hf_config or {}))
    remarks: list[str] = []
    linear, linear_layers = _linear_attention(args, config, remarks)
    experts = _experts(args)
    moe_layers = moe_layer_pattern(_get(args, "moe_layer_freq", 1), args.num_layers)
    indexer = _indexer(args, config, remarks)
    tower = tower_of(hf_config or {}) if takes_images(_get(args, "spec")) else None
    if tower is None and takes_images(_get(args, "spec")):
        remarks.append("the vision tower is not counted: no config.json has its sizes")
    selects = [indexer is not None] * int(args.num_layers)
    if indexer is not None and len(told := hf_fields.selecting_layers(dict(config))) == args.num_layers:
        selects = told
    attention: Sequence[LayerAttention | None] = layer_attention(config)
    if len(attention) != args.num_layers:
        if any(name in _spec(args) for name in OWN_LAYERS):
            remarks.append("layers with windows are counted as attending to all tokens: no flag describes them")
        attention = [None] * int(args.num_layers)
    if _get(args, "window_size"):
        remarks.append("layers with --window-size are counted as attending to all tokens")
    heads, hidden = int(args.num_attention_heads), int(args.hidden_size)
    gated = bool(_get(args, "swiglu", False) or _get(args, "gated_linear_unit", False))
    return ModelShape(
        hidden=hidden,
        ffn=int(_get(args, "ffn_hidden_size") or default_ffn_hidden_size(hidden, gated)),
        heads=heads,
        groups=int(args.num_query_groups) if _get(args, "group_query_attention", False) else heads,
        head_dim=int(_get(args, "kv_channels") or hidden // heads),
        vocab=padded_vocab_size(args),
        vocab_unpadded=int(vocab),
        kinds=tuple(
            LayerKind(is_linear, experts is not None and bool(is_moe), selecting, own)
            for is_linear, is_moe, selecting, own in zip(linear_layers, moe_layers, selects, attention, strict=True)
        ),
        gated=gated,
        fused_gate=not any(name in _spec(args) for name in OWN_LAYERS),
        untied=bool(_get(args, "untie_embeddings_and_output_weights", False)),
        linear_bias=bool(_get(args, "add_bias_linear", True)),
        qkv_bias=bool(_get(args, "add_qkv_bias", False)),
        qk_norm=bool(_get(args, "qk_layernorm", False)),
        qk_norm_whole="minimax_m2" in _spec(args),
        sinks="gpt_oss" in _spec(args) or _get(args, "softmax_type") == "learnable",
        norm=1 if _get(args, "normalization", "LayerNorm") == "RMSNorm" else 2,
        positions=_learned_positions(args),
        output_gate=bool(_get(args, "attention_output_gate", False) or _get(args, "use_gated_attention", False)),
        post_attention_norm=bool(_get(args, "post_self_attn_layernorm", False)),
        post_mlp_norm=bool(_get(args, "post_mlp_layernorm", False)),
        latent=_latent(args) if _get(args, "multi_latent_attention", False) else None,
        experts=experts,
        linear=linear,
        indexer=indexer,
        tower=tower,
        mtp=int(_get(args, "mtp_num_layers", 0)),
        remarks=tuple(remarks),
    )


def padded_vocab_size(args: Args) -> int:
    """Return the rows of the embedding: ``padded_vocab_size`` when given, else ``vocab_size`` rounded up.

    It is rounded to a multiple of ``make_vocab_size_divisible_by`` times the tensor-parallel size, as in Megatron-LM.
    Raises ValueError for a given size that the tensor-parallel ranks cannot divide, and without either size.
    """
    tp = int(_get(args, "tensor_model_parallel_size", 1))
    given = _get(args, "padded_vocab_size")
    if given:
        if given % tp:
            raise ValueError(f"--padded-vocab-size {given} is not a multiple of --tensor-model-parallel-size {tp}")
        return int(given)
    if args.vocab_size is None:
        raise ValueError("neither --vocab-size nor --padded-vocab-size is known: give one, or --hf-checkpoint")
    multiple = int(_get(args, "make_vocab_size_divisible_by", 128)) * tp
    return -(-args.vocab_size // multiple) * multiple


def default_ffn_hidden_size(hidden: int, gated: bool) -> int:
    """Return Megatron-LM's default width of the MLP: 4h, with a gate 2/3 of it in multiples of 64."""
    return int((4 * hidden * 2 / 3) / 64) * 64 if gated else 4 * hidden


def moe_layer_pattern(frequency: int | Sequence[int], num_layers: int) -> list[int]:
    """Return one 0/1 entry per layer from Megatron's ``moe_layer_freq``: every n-th layer, or the pattern itself."""
    if isinstance(frequency, int):
        return [int(frequency > 0 and layer % frequency == 0) for layer in range(num_layers)]
    if len(frequency) != num_layers:
        raise ValueError(f"--moe-layer-freq has {len(frequency)} entries for {num_layers} layers")
    return [int(bool(entry)) for entry in frequency]


def _get(args: Namespace, name: str, default: object = None) -> Any:
    value = getattr(args, name, None)
    return default if value is None else value


def _spec(args: Args) -> str:
    return " ".join(map(str, _get(args, "spec", [])))


def _learned_positions(args: Args) -> int:
    kind = _get(args, "position_embedding_type", "learned_absolute")
    if _get(args, "use_rotary_position_embeddings", False) or kind != "learned_absolute":
        return 0
    if not _get(args, "add_position_embedding", True):
        return 0
    return int(_get(args, "max_position_embeddings") or _get(args, "seq_length") or 0)


def _latent(args: Args) -> Latent:
    q_rank = _get(args, "q_lora_rank")
    return Latent(
        q_rank=None if q_rank is None else int(q_rank),
        kv_rank=int(_get(args, "kv_lora_rank", 32)),
        qk_dim=int(_get(args, "qk_head_dim", 128)),
        rope_dim=int(_get(args, "qk_pos_emb_head_dim", 64)),
        v_dim=int(_get(args, "v_head_dim", 128)),
    )


def _experts(args: Args) -> Experts | None:
    number = _get(args, "num_experts") or _get(args, "num_moe_experts")
    if not number:
        return None
    return Experts(
        number=int(number),
        top_k=int(_get(args, "moe_router_topk", 2)),
        ffn=int(_get(args, "moe_ffn_hidden_size") or args.ffn_hidden_size),
        shared=int(_get(args, "moe_shared_expert_intermediate_size", 0)),
        shared_gate=bool(_get(args, "moe_shared_expert_gate", False)),
        latent=_get(args, "moe_latent_size"),
        bias=bool(_get(args, "moe_router_enable_expert_bias", False)),
        beside="gemma4" in _spec(args),
    )


def _linear_attention(
    args: Args, config: Mapping[str, Any], remarks: list[str]
) -> tuple[LinearAttention | None, list[bool]]:
    """Return the gated delta net and which layers have it, from the flags or else from the checkpoint's config."""
    layers = int(args.num_layers)
    frequency = _get(args, "linear_attention_freq")
    if isinstance(frequency, list | tuple):
        if len(frequency) != layers:
            raise ValueError(f"--linear-attention-freq has {len(frequency)} entries for {layers} layers")
        return gated_delta_net(vars(args).get), [bool(entry) for entry in frequency]
    if frequency is not None:  # the last of every N layers has softmax attention
        return gated_delta_net(vars(args).get), [(i + 1) % int(frequency) != 0 for i in range(layers)]
    types = config.get("layer_types") or _types_from_interval(config, layers)
    if len(types) == layers and "linear_attention" in types:
        return gated_delta_net(config.get), [kind == "linear_attention" for kind in types]
    if any(family in _spec(args) for family in ("qwen3_next", "qwen3_5")):
        remarks.append("linear-attention layers are counted as softmax attention: no flag describes them")
    return None, [False] * layers


def _types_from_interval(config: Mapping[str, Any], layers: int) -> list[str]:
    interval = config.get("full_attention_interval")
    if not interval or not config.get("linear_num_value_heads"):
        return []
    return ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]


def gated_delta_net(get: Callable[[str], Any]) -> LinearAttention:
    """Return the sizes that ``get`` finds under the names of Megatron's flags, which are those of checkpoints."""

    def number(name: str, default: int) -> int:
        value = get(name)
        return default if value is None else int(value)

    return LinearAttention(
        key_heads=number("linear_num_key_heads", 16),
        value_heads=number("linear_num_value_heads", 32),
        key_dim=number("linear_key_head_dim", 128),
        value_dim=number("linear_value_head_dim", 128),
        kernel=number("linear_conv_kernel_dim", 4),
    )


def _indexer(args: Args, config: Mapping[str, Any], remarks: list[str]) -> Indexer | None:
    heads = _get(args, "dsa_indexer_n_heads") or config.get("index_n_heads")
    dim = _get(args, "dsa_indexer_head_dim") or config.get("index_head_dim")
    if heads and dim:
        return Indexer(int(heads), int(dim))
    if any(family in _spec(args) for family in ("glm5", "deepseek_v32")):
        remarks.append("the indexer of sparse attention is not counted: no flag describes it")
    return None
