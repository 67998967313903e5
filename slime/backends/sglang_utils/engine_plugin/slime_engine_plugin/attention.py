"""Attention of SGLang's torch-native backend on a CPU, for many sequences per call.

Stock SGLang loops over the sequences of a batch in Python. Prefill is grouped here by (new, cached) length; decoding
goes over kept copies of keys and values (``kv_mirror.py``). Whatever is not plain causal self-attention of one pool is
left to SGLang: cross attention, sliding windows, latent attention, speculation, pipeline stages.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch.nn.functional import scaled_dot_product_attention

from slime_engine_plugin.kv_mirror import DecodeStep, KVMirror

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
MIN_DECODE_BATCH = 4
"""Fewer sequences are decoded faster by SGLang's loop: a step is dispatch then, and the mirror adds to it."""

_MIRRORS: weakref.WeakKeyDictionary[Any, KVMirror] = weakref.WeakKeyDictionary()
_PLANS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ExtendGroup:
    """Sequences of a prefill batch with equally many new and cached tokens.

    positions: [sequences, new] rows of the batch's queries; places: [sequences, cached + new] in the KV pool, None
    where nothing is cached; mask: [new, cached + new], additive, None for the usual causal one.
    """

    positions: torch.Tensor
    places: torch.Tensor | None
    mask: torch.Tensor | None


def prepare(result: None, backend: Any, forward_batch: Any) -> None:
    """After ``init_forward_metadata``: plan this forward pass, or leave it to SGLang."""
    _PLANS.pop(backend, None)
    mode = forward_batch.forward_mode
    if not _is_plain(backend, forward_batch):
        return
    if mode.is_decode():
        requests = forward_batch.req_pool_indices.tolist()
        if len(requests) >= MIN_DECODE_BATCH and len(set(requests)) == len(requests):
            mirror = _MIRRORS.get(backend)
            if mirror is None:
                mirror = _MIRRORS[backend] = KVMirror(backend.token_to_kv_pool.size)
            lengths = forward_batch.seq_lens.tolist()
            _PLANS[backend] = mirror.plan(requests, lengths, backend.req_to_token_pool.req_to_token)
    elif mode.is_extend():
        if backend in _MIRRORS:
            _MIRRORS[backend].forget(forward_batch.req_pool_indices.tolist())
        _PLANS[backend] = extend_groups(forward_batch, backend.req_to_token_pool.req_to_token)


def decode(
    original: Callable[..., torch.Tensor],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
) -> torch.Tensor:
    """Around ``forward_decode``."""
    step = _PLANS.get(backend)
    if not (isinstance(step, DecodeStep) and save_kv_cache and _is_plain_layer(backend, layer, q, k)):
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache)
    _store(backend, layer, forward_batch, k, v)
    heads, dim = layer.tp_q_head_num, layer.qk_head_dim
    pool = _pool(backend, layer)
    output = _MIRRORS[backend].attend(
        step,
        layer.layer_id,
        q.reshape(-1, heads, dim),
        k.reshape(-1, layer.tp_k_head_num, dim),
        v.reshape(-1, layer.tp_v_head_num, dim),
        pool,
        layer.scaling,
    )
    return output.view(-1, heads * dim)


def extend(
    original: Callable[..., torch.Tensor],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
) -> torch.Tensor:
    """Around ``forward_extend``."""
    groups = _PLANS.get(backend)
    if not (isinstance(groups, list) and save_kv_cache and _is_plain_layer(backend, layer, q, k)):
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache)
    _store(backend, layer, forward_batch, k, v)
    dim = layer.qk_head_dim
    output = torch.empty_like(q)
    query, shaped = q.view(-1, layer.tp_q_head_num, dim), output.view(-1, layer.tp_q_head_num, dim)
    new = k.view(-1, layer.tp_k_head_num, dim), v.view(-1, layer.tp_v_head_num, dim)
    pool = _pool(backend, layer)
    for group in groups:
        where, source = (group.positions, new) if group.places is None else (group.places, pool)
        key, value = (tensor[where].transpose(1, 2).to(q.dtype) for tensor in source)
        attended = scaled_dot_product_attention(
            query[group.positions].transpose(1, 2), key, value,
            attn_mask=None if group.mask is None else group.mask.to(q.dtype), is_causal=group.mask is None,
            scale=layer.scaling, enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )  # fmt: skip
        shaped[group.positions] = attended.transpose(1, 2)
    return output


def extend_groups(forward_batch: Any, req_to_token: torch.Tensor) -> list[ExtendGroup]:
    """Group the sequences of a prefill batch by how many tokens are new and how many are cached."""
    cached, new = forward_batch.extend_prefix_lens.tolist(), forward_batch.extend_seq_lens.tolist()
    members: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    start = 0
    for slot, prefix, length in zip(forward_batch.req_pool_indices.tolist(), cached, new, strict=True):
        members[length, prefix].append((slot, start))
        start += length
    groups = []
    for (length, prefix), entries in members.items():
        slots, starts = (torch.tensor(column) for column in zip(*entries, strict=True))
        positions = starts[:, None] + torch.arange(length)
        if prefix == 0:
            groups.append(ExtendGroup(positions, None, None))
            continue
        total = prefix + length
        future = torch.arange(total) > torch.arange(prefix, total)[:, None]
        mask = torch.zeros(length, total).masked_fill_(future, -torch.inf)
        groups.append(ExtendGroup(positions, req_to_token[slots, :total].to(torch.int64), mask))
    return groups


def give_back(*args: Any, **kwargs: Any) -> None:
    """Before the cache is flushed, which happens without running requests: keep no copies of it."""
    for mirror in _MIRRORS.values():
        mirror.clear()


def _is_plain(backend: Any, forward_batch: Any) -> bool:
    from sglang.srt.runtime_context import get_parallel

    return (
        forward_batch.encoder_lens is None
        and forward_batch.spec_info is None
        and _holds_keys_and_values(backend.token_to_kv_pool)
        and get_parallel().pp_size == 1  # batches of several stages take turns, and would drop each other's rows
        and forward_batch.batch_size == len(forward_batch.req_pool_indices) == len(forward_batch.seq_lens)
    )


def _is_plain_layer(backend: Any, layer: Any, q: torch.Tensor, k: torch.Tensor | None) -> bool:
    from sglang.srt.layers.radix_attention import AttentionType

    windowed = layer.sliding_window_size is not None and layer.sliding_window_size > -1
    return (
        k is not None
        and q.dtype == k.dtype == backend.token_to_kv_pool.dtype
        and layer.qk_head_dim == layer.v_head_dim
        and not layer.is_cross_attention
        and layer.attn_type != AttentionType.ENCODER_ONLY
        and not windowed
    )


def _store(backend: Any, layer: Any, forward_batch: Any, k: torch.Tensor, v: torch.Tensor) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    location = KVWriteLoc(forward_batch.out_cache_loc, backend.swa_out_cache_loc)
    backend.token_to_kv_pool.set_kv_buffer(layer, location, k, v)


def _pool(backend: Any, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    pool = backend.token_to_kv_pool
    return pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)


def _holds_keys_and_values(pool: Any) -> bool:
    """Whether the pool has one key and one value per token, head and layer, as they are: not latent, not quantized."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool

    inner = pool.full_kv_pool if isinstance(pool, HybridLinearKVPool) else pool
    return type(inner) is MHATokenToKVPool and not inner.is_quantized_kv_cache


def register() -> None:
    """Register the hooks."""
    HookRegistry.register(f"{_BACKEND}.init_forward_metadata", prepare, HookType.AFTER)
    HookRegistry.register(f"{_BACKEND}.forward_decode", decode, HookType.AROUND)
    HookRegistry.register(f"{_BACKEND}.forward_extend", extend, HookType.AROUND)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.flush_cache", give_back, HookType.BEFORE)
