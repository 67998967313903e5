"""Sparse attention (DeepSeek-V3.2, GLM-5) on a CPU: latent attention to the keys that an indexer chooses.

SGLang computes both with CUDA kernels, over a pool that holds the keys of the indexers too, and sets its arguments by
the GPU that it finds. Here all of it but the attention layers takes the model for one with dense latent attention.
A layer builds SGLang's indexer, which keeps its keys by slot of the KV pool, where the latents of a cached prefix are
found too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch.nn import functional as F

from slime_engine_plugin.hook_points import require

if TYPE_CHECKING:
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

_IS_SPARSE = "sglang.srt.configs.model_config.is_deepseek_dsa"
_ATTENTION = "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.__init__"
_INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer"
_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward"
_BUILDING: ContextVar[bool] = ContextVar("_BUILDING", default=False)
ARCHITECTURES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
SCORES = 2**26
"""The number of scores, over all heads of the indexer, that are computed at once, as in the trainer."""


def is_sparse(original: Callable[[Any], bool], config: Any) -> bool:
    """Around ``is_deepseek_dsa``: of ARCHITECTURES attention layers alone are, while they are built."""
    from sglang.srt.configs.model_config import _hf_arch

    return original(config) and (_BUILDING.get() or _hf_arch(config) not in ARCHITECTURES)


def with_indexer(original: Callable[..., None], attention: DeepseekV2AttentionMLA, *args: Any, **kwargs: Any) -> None:
    """Around ``DeepseekV2AttentionMLA.__init__``: build the indexer.

    Raises ValueError where keys or selections would have to be carried, or a request's next tokens be verified.
    """
    from sglang.srt.runtime_context import get_parallel, get_server_args

    token = _BUILDING.set(True)
    try:
        original(attention, *args, **kwargs)
    finally:
        _BUILDING.reset(token)
    if not attention.use_dsa:
        return
    server = get_server_args()
    unserved = {
        "--disaggregation-mode": server.disaggregation_mode != "null",
        "--enable-hierarchical-cache": server.enable_hierarchical_cache,
        "--speculative-algorithm": server.speculative_algorithm is not None,
        "--pp-size and layers that share selections": attention.skip_topk and get_parallel().pp_size > 1,
    }
    if given := [name for name, is_given in unserved.items() if is_given]:
        raise ValueError(f"sparse attention is not served on a CPU with {', '.join(given)}; leave out the option")


def in_the_models_dtype(result: None, indexer: Indexer, *args: Any, **kwargs: Any) -> None:
    """After ``Indexer.__init__``: head weights have the model's type, not bf16; there are no keys yet."""
    indexer.weights_proj.to(torch.get_default_dtype())
    indexer.keys = None


def choose(
    indexer: Indexer,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
    layer_id: int,
) -> torch.Tensor | None:
    """Replace ``Indexer.forward_native``: keep the keys of new tokens, choose the ``index_topk`` best ones for each.

    Returns positions in the request [tokens, index_topk], int64, -1 where there are fewer; None where all tokens of all
    requests are chosen. Scores are ``sum over heads h of w_h relu(q_h k)``, in fp32. ``x`` [tokens, hidden]; ``q_lora``
    [tokens, rank], normalized; ``positions`` [tokens].
    """
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    topk, rotation = indexer.index_topk, indexer.rotary_emb.cos_sin_cache[positions].float().unsqueeze(1)
    query = indexer.wq_b(q_lora)[0].float().unflatten(-1, (indexer.n_heads, indexer.head_dim))
    key = indexer.k_norm(indexer.wk(x)[0].float()).unsqueeze(1)
    query, key = (rotate(x, rotation, indexer.rotary_emb.is_neox_style) for x in (query, key))
    weight = F.linear(x.float(), indexer.weights_proj.weight.float()) * (indexer.n_heads * indexer.head_dim) ** -0.5
    if indexer.keys is None:
        indexer.keys = key.new_zeros(len(get_token_to_kv_pool().get_key_buffer(layer_id)), indexer.head_dim)
    indexer.keys[forward_batch.out_cache_loc] = key.squeeze(1)
    if int(forward_batch.seq_lens.max()) <= topk:
        return None
    chosen = torch.full((len(x), topk), -1)
    for rows, slots in requests(forward_batch):
        keys = indexer.keys[slots]
        for part in rows.split(max(1, SCORES // (indexer.n_heads * len(slots)))):
            scores = torch.einsum("qhd,kd->qhk", query[part], keys).relu_()
            scores = torch.einsum("qhk,qh->qk", scores, weight[part])
            scores.masked_fill_(torch.arange(len(slots)) > positions[part, None], -torch.inf)
            best = scores.topk(min(topk, len(slots)))
            chosen[part, : best.indices.shape[1]] = best.indices.masked_fill(best.values.isneginf(), -1)
    return chosen


def rotate(x: torch.Tensor, rotation: torch.Tensor, halves: bool) -> torch.Tensor:
    """Rotate the first numbers of heads, as the trainer does: their order afterwards is that of both queries and keys.

    ``x`` [tokens, heads, dim]; ``rotation`` [tokens, 1, rotated]: cosines, then sines. SGLang's own function adds a
    dimension where YaRN rotates numbers half of the rotated part apart (``halves``).
    """
    cos, sin = rotation.chunk(2, -1)
    part, rest = x.split([rotation.shape[-1], x.shape[-1] - rotation.shape[-1]], -1)
    first, second = part.chunk(2, -1) if halves else (part[..., 0::2], part[..., 1::2])
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attend(
    original: Callable[..., torch.Tensor],
    backend: TorchNativeAttnBackend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: RadixAttention,
    forward_batch: ForwardBatch,
    save_kv_cache: bool = True,
    topk_indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Around ``TorchNativeAttnBackend.forward``: attend to the tokens that :func:`choose` returned, if it did."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    if topk_indices is None:
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
    pool = backend.token_to_kv_pool
    pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
    query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim).transpose(0, 1)
    output = q.new_empty(len(k), layer.tp_q_head_num, layer.v_head_dim)
    for rows, slots in requests(forward_batch):
        # One column more than tokens: it is the last one, which -1 is, and is cut off.
        seen = torch.zeros(len(rows), len(slots) + 1, dtype=torch.bool)
        seen.scatter_(1, topk_indices[rows] % (len(slots) + 1), True)
        key, value = (
            buffer[slots].to(q.dtype).transpose(0, 1)
            for buffer in (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id))
        )
        output[rows] = F.scaled_dot_product_attention(
            query[None, :, rows], key[None], value[None], attn_mask=seen[:, :-1], scale=layer.scaling, enable_gqa=True
        )[0].transpose(0, 1)
    return output.flatten(1)


def requests(forward_batch: ForwardBatch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the rows of each request's new tokens, which are its last ones, and the slots of all its tokens."""
    from sglang.srt.model_executor.forward_context import get_req_to_token_pool

    tables = get_req_to_token_pool().req_to_token[forward_batch.req_pool_indices]
    lengths = forward_batch.seq_lens.tolist()
    is_decode = forward_batch.forward_mode.is_decode()
    new = [1] * len(lengths) if is_decode else forward_batch.extend_seq_lens.tolist()
    rows = torch.arange(sum(new)).split(new)
    for table, length, own in zip(tables, lengths, rows, strict=True):
        yield own, table[:length]


def register() -> None:
    """Register the hooks."""
    for function in (_IS_SPARSE, "sglang.srt.configs.model_config._hf_arch"):
        require(function, "config")
    require(
        _ATTENTION,
        "self config hidden_size num_heads qk_nope_head_dim qk_rope_head_dim v_head_dim q_lora_rank kv_lora_rank "
        "rope_theta rope_scaling max_position_embeddings quant_config reduce_results layer_id prefix alt_stream "
        "skip_rope is_nextn",
    )
    require(f"{_INDEXER}.forward_xpu", "self x q_lora positions forward_batch layer_id return_indices")
    require(_BACKEND, "self q k v layer forward_batch save_kv_cache kwargs")
    HookRegistry.register(_IS_SPARSE, is_sparse, HookType.AROUND)
    HookRegistry.register(_ATTENTION, with_indexer, HookType.AROUND)
    HookRegistry.register(f"{_INDEXER}.__init__", in_the_models_dtype, HookType.AFTER)
    HookRegistry.register(f"{_INDEXER}.forward_native", choose, HookType.REPLACE)
    HookRegistry.register(_BACKEND, attend, HookType.AROUND)
