"""Memory of a GPU of an engine: weights, key-value cache, and how many requests that is room for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slime.arguments.args import Args
from slime.arguments.placement import EngineSizes
from slime.models.facts import quantization_by_name
from slime.models.shape import LayerKind, ModelShape
from slime.models.tower import tower_of
from slime.preflight.plan.memory_trainer import CONTEXT, longest_sample
from slime.preflight.plan.model_size import Weight, layer_weights

MIB, GIB = 2**20, 2**30
VOCAB_MULTIPLE = 64  # SGLang pads the embedding to this
WINDOW_SHARE = 0.8  # SGLang's --swa-full-tokens-ratio
KV_BYTES = {"bf16": 2.0, "bfloat16": 2.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "mxfp8": 1 + 1 / 32, "fp4_e2m1": 0.5625}
KV_BYTES |= {"fp4_mx_block16": 0.5625, "nvfp4": 0.5625}


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of an engine on one GPU.

    ``kv_per_token``: of the cache, on every GPU of the engine; ``state_per_request``: of linear attention;
    ``request_tokens``: the longest request, None when the flags do not limit it; ``static_fraction``: as given, None
    when SGLang chooses it. ``state_share``: the part of the pool that SGLang gives to states of linear attention.
    """

    sizes: EngineSizes
    format: WeightFormat
    weights: int
    kv_per_token: float
    state_per_request: int
    request_tokens: int | None
    static_fraction: float | None
    chunked_prefill: int | None
    graph_batch: int | None
    cache_tokens: int | None
    state_share: float = 0.0
    context: int = CONTEXT

    def reserve(self, capacity: float) -> float:
        """Return the bytes of ``capacity`` that stay free for activations and CUDA graphs, as SGLang chooses them.

        Its rule (``handle_gpu_memory_settings``, 0.5.20), in MiB: 512 + 1.5 per token of a prefill chunk + 128 per
        GPU of the engine + 2 per request of the largest graph + 8 per graph of a prefill; at least 10 GiB on
        GPUs above 60 GiB.
        """
        if self.static_fraction is not None:
            return capacity * (1 - self.static_fraction)
        chunk, batch = _by_capacity(capacity, self.sizes.tp)
        chunk, batch = self.chunked_prefill or chunk, self.graph_batch or batch
        mib = 512 + 1.5 * max(chunk, 2048) + 128 * self.sizes.gpus + 2 * batch + 8 * _prefill_graphs(chunk)
        if self.sizes.dp > 1:
            mib += batch * self.sizes.dp * (4.5 if batch > 300 else 3)
        return max(mib * MIB, 10 * GIB if capacity > 60 * GIB else 0)

    def cache_bytes(self, capacity: float) -> float:
        """Return the bytes left for the key-value cache on a GPU of ``capacity`` bytes; negative: it does not fit."""
        return (capacity - self.reserve(capacity) - self.weights) * (1 - self.state_share)

    def tokens(self, capacity: float) -> int:
        """Return the tokens that the caches of one engine hold."""
        if not self.kv_per_token:
            return 0
        fits = max(0, int(self.cache_bytes(capacity) / self.kv_per_token))
        return (fits if self.cache_tokens is None else min(fits, self.cache_tokens)) * self.sizes.dp

    def requests(self, capacity: float) -> int | None:
        """Return how many of the longest requests one engine can hold at once."""
        if not self.request_tokens:
            return None
        by_tokens = self.tokens(capacity) // self.request_tokens if self.kv_per_token else None
        states = (capacity - self.reserve(capacity) - self.weights) * self.state_share
        by_state = max(0, int(states // self.state_per_request)) * self.sizes.dp if self.state_per_request else None
        return min((number for number in (by_tokens, by_state) if number is not None), default=None)

    def fits(self, capacity: float) -> bool:
        """Return True if the weights and one request of the greatest length fit into the static part."""
        per_group = self.tokens(capacity) // self.sizes.dp
        return self.cache_bytes(capacity) > 0 and per_group >= (self.request_tokens or 1)


def engine_memory(args: Args, shape: ModelShape, hf_config: Mapping[str, Any] | None = None) -> EngineMemory:
    """Return the memory of a GPU of one engine. Raises ValueError when its sizes do not divide."""
    pp = int(args.sglang_pp_size or 1)
    dp = int(args.sglang_dp_size or 1) if args.sglang_enable_dp_attention else 1
    sizes = EngineSizes(tp=max(1, int(args.rollout_num_gpus_per_engine) // pp), pp=pp, dp=dp)
    layout = weight_format(args, hf_config)
    drafts = bool(args.sglang_speculative_algorithm)
    # An engine loads the tower of its checkpoint, also where the trainer trains the language model alone.
    shape = replace(shape, mtp=max(shape.mtp, 1) if drafts else 0, tower=tower_of(hf_config or {}))
    return EngineMemory(
        sizes=sizes,
        format=layout,
        weights=int(_weights(args, shape, sizes, layout)),
        kv_per_token=_kv_per_token(args, shape, sizes, layout),
        state_per_request=_state_per_request(shape, sizes, layout),
        request_tokens=longest_sample(args),
        static_fraction=args.sglang_mem_fraction_static,
        chunked_prefill=args.sglang_chunked_prefill_size,
        graph_batch=args.sglang_cuda_graph_max_bs_decode,
        cache_tokens=args.sglang_max_total_tokens,
        state_share=_state_share(args, shape),
    )


def _weights(args: Args, shape: ModelShape, sizes: EngineSizes, layout: WeightFormat) -> float:
    """Bytes of the weights on the pipeline stage that holds the most layers."""
    per_layer = {kind: _layer_bytes(args, shape, kind, sizes, layout) for kind in set(shape.kinds)}
    layers = sum(per_layer[kind] for kind in shape.kinds) * -(-shape.layers // sizes.pp) / shape.layers
    layers += shape.norm * shape.hidden * layout.element  # the last norm
    drafts = shape.mtp * (per_layer[shape.kinds[-1]] + 2 * shape.hidden**2 * layout.bytes_per_weight)
    rows = -(-shape.vocab_unpadded // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    matrix = rows * shape.hidden * layout.element
    if shape.tower is not None:
        whole = shape.tower.hidden * (shape.tower.patch_numbers + shape.tower.positions)
        shared_by = 1 if args.sglang_mm_enable_dp_encoder else sizes.tp
        layers += layout.element * (whole + (shape.tower.parameters - whole) / shared_by)
    # With data-parallel attention every rank embeds its own tokens.
    embedding = matrix / (1 if sizes.dp > 1 else sizes.tp)
    output = matrix / sizes.tp
    if sizes.pp > 1:
        return layers + drafts + max(embedding, output)
    return layers + drafts + embedding + (output if shape.untied else 0)


def _layer_bytes(args: Args, shape: ModelShape, kind: LayerKind, sizes: EngineSizes, layout: WeightFormat) -> float:
    total = 0.0
    for weight in layer_weights(shape, kind):
        total += weight.numel * weight.count / _shared_by(args, weight, sizes) * _weight_bytes(weight, layout)
    if kind.linear:
        return total
    if shape.latent is not None:
        # The up-projection of keys and values is kept a second time, in the form that is absorbed by queries.
        latent = shape.latent
        absorbed = latent.kv_rank * shape.heads * (latent.qk_dim + latent.v_dim)
        return total + absorbed * layout.element / sizes.attention_tp
    # Fewer groups of keys and values than ranks: they are repeated.
    groups, dim, _ = shape.heads_of(kind)
    repeated = max(0, sizes.attention_tp - groups)
    key_value = 2 * shape.hidden * dim * repeated / sizes.attention_tp
    return total + key_value * layout.bytes_per_weight


def _shared_by(args: Args, weight: Weight, sizes: EngineSizes) -> int:
    """Ranks that share a weight of the engine."""
    if weight.split == "none":
        return 1
    if weight.split == "expert":
        return sizes.tp
    if weight.part == "attention":
        return sizes.attention_tp
    if weight.part == "experts":  # shared experts stay whole where tokens travel to the experts
        travels = args.sglang_moe_a2a_backend not in (None, "none")
        return 1 if travels else sizes.tp
    return int(args.sglang_moe_dense_tp_size or sizes.tp)


def _weight_bytes(weight: Weight, layout: WeightFormat) -> float:
    routes = weight.part == "experts" and weight.split == "none"
    if weight.part == "norms" or routes or (layout.experts_only and weight.split != "expert"):
        return layout.element
    return layout.bytes_per_weight


def _kv_per_token(args: Args, shape: ModelShape, sizes: EngineSizes, layout: WeightFormat) -> float:
    """Bytes per token on one GPU: keys and values of its heads, or the latent that every rank holds whole."""
    cached = sum(not kind.linear for kind in shape.kinds)
    layers = -(-cached // sizes.pp) + shape.mtp
    name = args.sglang_kv_cache_dtype or "auto"
    element = KV_BYTES.get(name, layout.element)
    if shape.latent is not None:
        size = (shape.latent.kv_rank + shape.latent.rope_dim) * element
        if shape.indexer is not None:
            size += shape.indexer.dim + 4 * shape.indexer.dim / 128  # fp8 keys with a scale per 128
        return layers * size
    keys = [_keys(args, shape, kind, sizes) for kind in shape.kinds if not kind.linear]
    return layers * 2 * sum(keys) / len(keys) * element


def _keys(args: Args, shape: ModelShape, kind: LayerKind, sizes: EngineSizes) -> float:
    """Numbers of the keys of a token in one layer.

    In Gemma 4 and gpt-oss SGLang gives layers with a window a pool of their own, with a share of the others' places.
    """
    groups, dim, _ = shape.heads_of(kind)
    numbers = max(1, groups // sizes.attention_tp) * dim
    two_pools = shape.sinks or any(own.attention and own.attention.keys_are_values for own in shape.kinds)
    if (
        not two_pools
        or args.sglang_disable_hybrid_swa_memory
        or kind.attention is None
        or kind.attention.window is None
    ):
        return numbers
    ratio = args.sglang_swa_full_tokens_ratio
    return numbers * (WINDOW_SHARE if ratio is None else ratio)


def _state_per_request(shape: ModelShape, sizes: EngineSizes, layout: WeightFormat) -> int:
    """Bytes of the recurrent and the convolution state of a request, in fp32 and in the model's type."""
    if shape.linear is None:
        return 0
    linear, layers = shape.linear, sum(kind.linear for kind in shape.kinds)
    recurrent = 4 * linear.value_heads * linear.key_dim * linear.value_dim
    convolution = layout.element * (2 * linear.keys + linear.values) * (linear.kernel - 1)
    return int(-(-layers // sizes.pp) * (recurrent + convolution) / sizes.attention_tp)


def _state_share(args: Args, shape: ModelShape) -> float:
    if shape.linear is None:
        return 0.0
    ratio = float(args.sglang_mamba_full_memory_ratio or 0.9)
    return ratio / (1 + ratio)


def _by_capacity(capacity: float, tp: int) -> tuple[int, int]:
    """Return SGLang's (tokens of a prefill chunk, requests of the largest graph) for a GPU of ``capacity`` bytes."""
    few = tp < 4
    for limit, chunk, batch in (
        (20, 2048, 8),
        (35, 4096, 48 if few else 160),
        (60, 4096, 32 if few else 160),
        (160, 8192, 256 if few else 512),
    ):
        if capacity < limit * GIB:
            return chunk, batch
    return 16384, 512


def _prefill_graphs(chunk: int) -> int:
    """Number of the sizes that SGLang records prefill graphs for, up to a chunk of ``chunk`` tokens."""
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, chunk + 1, 512))
    return sum(size <= chunk for start, stop, step in steps for size in range(start, stop, step))


DTYPES = {"float32": 4.0, "float": 4.0, "float16": 2.0, "half": 2.0, "bfloat16": 2.0}

# Bytes of a weight with its scales: fp8 has one fp32 scale per 128 x 128 block, 4-bit types one of 8 or 16 bits per
# 16 to 128 weights (an eighth of a bit to half a bit each).
EIGHT_BIT, FOUR_BIT = 1.0 + 4 / 128**2, 0.5 + 1 / 16
METHODS: dict[str, float] = {
    **dict.fromkeys(
        ("fp8", "w8a8_fp8", "modelopt_fp8", "mxfp8", "w8a8_int8", "auto-round-int8", "modelopt"), EIGHT_BIT
    ),
    **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "auto-round", "moe_wna16", "bitsandbytes"), FOUR_BIT),
    **dict.fromkeys(("mxfp4", "modelopt_fp4", "nvfp4_online", "petit_nvfp4", "w4afp8", "mxfp_w4a8"), FOUR_BIT),
}
ONLY_EXPERTS = frozenset({"moe_wna16", "w4afp8", "mxfp4"})


@dataclass(frozen=True)
class WeightFormat:
    """``element``: bytes of an unquantized weight (embeddings, norms, router); ``bytes_per_weight``: of the others.

    ``experts_only``: only experts are quantized. ``name`` is what to call it; ``known`` is False when the
    quantization is not one whose size is known here, and the weights are counted unquantized.
    """

    name: str
    element: float
    bytes_per_weight: float
    experts_only: bool = False
    known: bool = True


def weight_format(args: Args, hf_config: Mapping[str, Any] | None = None) -> WeightFormat:
    """Return the format of an engine's weights: ``--sglang-quantization``, or that of the checkpoint.

    A checkpoint says its own in ``hf_config``. Where it is not there, its name does (``Qwen3-4B-FP8``), or that of the
    published model; the dtype ``auto`` is otherwise taken for 16 bits.
    """
    chosen = args.sglang_dtype or "auto"
    if args.fp16:
        chosen = "float16"
    element = DTYPES.get(chosen, 2.0)
    name = {2.0: "fp16" if chosen in ("float16", "half") else "bf16", 4.0: "fp32"}[element]
    stored = (hf_config or {}).get("quantization_config") or {}
    method = args.sglang_quantization or stored.get("quant_method")
    if method in (None, "unquant"):
        by_name = None if method else quantization_by_name(args.hf_checkpoint or "")
        if by_name == "fp8":
            return WeightFormat("fp8, by the checkpoint's name", element, EIGHT_BIT)
        if by_name == "int4":
            experts = any(key in (hf_config or {}) for key in ("num_experts", "n_routed_experts", "num_local_experts"))
            return WeightFormat("int4, by the checkpoint's name", element, FOUR_BIT, experts_only=experts)
        return WeightFormat(name, element, element)
    if method in ("compressed-tensors", "quark"):
        return _described(str(method), element, stored)
    size = METHODS.get(method)
    if size is None:
        return WeightFormat(method, element, element, known=False)
    return WeightFormat(method, element, size, experts_only=method in ONLY_EXPERTS)


def _described(method: str, element: float, stored: Mapping[str, Any]) -> WeightFormat:
    """A checkpoint that describes its quantization group by group: bits of the weights, and what is left out."""
    groups = [group for group in (stored.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    bits = [int((group.get("weights") or {}).get("num_bits") or 0) for group in groups]
    known = {8: EIGHT_BIT, 4: FOUR_BIT}
    if not bits or bits[0] not in known:
        return WeightFormat(method, element, element, known=False)
    left_out = " ".join(map(str, stored.get("ignore") or []))
    only_experts = "attn" in left_out and "shared" in left_out
    return WeightFormat(f"{method} of {bits[0]} bits", element, known[bits[0]], experts_only=only_experts)
