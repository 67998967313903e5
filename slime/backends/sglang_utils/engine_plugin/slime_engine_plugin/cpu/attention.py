"""SGLang's torch-native attention backend, for many sequences per call: on a CPU it loops over them in Python.

Prefill is grouped by (new, cached) length (``prefill.py``); decoding goes over kept copies of keys and values, or
gathers them when the copies would take more memory than the KV pool (``kv_mirror.py``). Whatever is not plain causal
self-attention of one pool is left to SGLang: cross attention, sliding windows and sinks (of which ``windows.py`` has
some), latent attention, quantized caches, speculation, pipeline stages.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVWriteLoc, MHATokenToKVPool
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

from slime_engine_plugin.cpu.kv_mirror import DecodeStep, GatheredRows, KVMirror, Pool, WorkBuffers
from slime_engine_plugin.cpu.prefill import Prefill
from slime_engine_plugin.hook_points import require

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

_STOCK = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
MIN_DECODE_BATCH = 4
"""Fewer sequences are decoded faster by SGLang's loop: a step is dispatch then, and the mirror adds to it."""
IDLE_S = 5.0
"""Seconds without a forward pass after which an idle engine gives the memory back."""

_BACKENDS: weakref.WeakSet[BatchedAttention] = weakref.WeakSet()


class BatchedAttention(TorchNativeAttnBackend):
    """Answers to the name ``torch_native``, so that SGLang's own checks of the backend hold."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        self._mirror = KVMirror(self.token_to_kv_pool.size)
        self._work = WorkBuffers()
        self._plan: DecodeStep | GatheredRows | Prefill | None = None
        self._plain_layers: dict[int, bool] = {}
        self._used_at = 0.0
        _BACKENDS.add(self)

    def forget(self, slots: list[int]) -> None:
        """Copy the keys and values of these request slots again before they are used."""
        self._mirror.forget(slots)

    @property
    def nbytes(self) -> int:
        """Memory of the copies."""
        return self._mirror.nbytes + self._work.nbytes

    def give_back(self) -> None:
        """Keep no copies."""
        self._mirror.clear()
        self._work.clear()

    def give_back_when_idle(self) -> None:
        """Keep no copies when there has been no forward pass for a while."""
        if self.nbytes and time.monotonic() - self._used_at > IDLE_S:
            self.give_back()

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan this forward pass, or leave it to SGLang."""
        super().init_forward_metadata(forward_batch)
        self._plan = None
        if not self._is_plain(forward_batch):
            return
        mode = forward_batch.forward_mode
        slots = forward_batch.req_pool_indices.tolist()
        req_to_token = self.req_to_token_pool.req_to_token
        self._used_at = time.monotonic()
        if mode.is_decode():
            if len(slots) >= MIN_DECODE_BATCH and len(set(slots)) == len(slots):
                lengths = forward_batch.seq_lens.tolist()
                requests = list(zip(slots, forward_batch.rids, strict=True))
                step = self._mirror.plan(requests, lengths, req_to_token)
                self._plan = step or GatheredRows(slots, lengths, req_to_token)
        elif mode.is_extend():
            self._mirror.forget(slots)
            cached, new = forward_batch.extend_prefix_lens.tolist(), forward_batch.extend_seq_lens.tolist()
            self._plan = Prefill(slots, cached, new, req_to_token)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **sinks: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of one new token per sequence."""
        plan, plain = self._plan, save_kv_cache and not sinks and self._is_plain_layer(layer, q, k)
        if isinstance(plan, Prefill) or plan is None or not plain:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **sinks)
        query, key, value, pool = self._store(q, k, v, layer, forward_batch)
        if isinstance(plan, DecodeStep):
            output = self._mirror.attend(plan, layer.layer_id, query, key, value, pool, layer.scaling)
        else:
            output = plan.attend(query, pool, layer.scaling, self._work)
        return output.view(len(output), -1)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **sinks: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of all new tokens of sequences."""
        plan, plain = self._plan, save_kv_cache and not sinks and self._is_plain_layer(layer, q, k)
        if not (isinstance(plan, Prefill) and plain):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **sinks)
        query, key, value, pool = self._store(q, k, v, layer, forward_batch)
        return plan.attend(query, key, value, pool, layer.scaling, self._work).view(q.shape)

    def _store(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Pool]:
        """Write new keys and values to the pool; return query, key and value by head, and the layer's pool."""
        location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
        pool = self.token_to_kv_pool
        pool.set_kv_buffer(layer, location, k, v)
        return (
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)),
        )

    def _is_plain(self, forward_batch: ForwardBatch) -> bool:
        return (
            forward_batch.encoder_lens is None
            and forward_batch.spec_info is None
            and get_parallel().pp_size == 1  # batches of several stages take turns, and would drop each other's rows
            and forward_batch.batch_size
            == len(forward_batch.req_pool_indices)
            == len(forward_batch.seq_lens)
            == len(forward_batch.rids or ())
        )

    def _is_plain_layer(self, layer: RadixAttention, q: torch.Tensor, k: torch.Tensor | None) -> bool:
        if layer.layer_id not in self._plain_layers:
            self._plain_layers[layer.layer_id] = (
                layer.qk_head_dim == layer.v_head_dim
                and not layer.is_cross_attention
                and layer.attn_type != AttentionType.ENCODER_ONLY
                and (layer.sliding_window_size is None or layer.sliding_window_size < 0)
                and _holds_keys_and_values(self.token_to_kv_pool, layer)
            )
        plain_types = k is not None and q.dtype == k.dtype == self.token_to_kv_pool.dtype
        return plain_types and self._plain_layers[layer.layer_id]


def _holds_keys_and_values(pool: KVCache, layer: RadixAttention) -> bool:
    """Return True if the pool has one plain key and value per place and head: not latent, quantized or blocked."""
    inner = pool.full_kv_pool if isinstance(pool, HybridLinearKVPool) else pool
    if type(inner) is not MHATokenToKVPool or inner.is_quantized_kv_cache:
        return False
    shape = (layer.tp_k_head_num, layer.qk_head_dim)
    sides = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    return all(side.is_contiguous() and side.shape[1:] == shape for side in sides)


def forget_transferred(result: None, batch: ScheduleBatch) -> None:
    """After ``prepare_for_prebuilt``: the keys and values of these requests came from a prefill engine."""
    slots = batch.req_pool_indices.tolist()
    for backend in _BACKENDS:
        backend.forget(slots)


def give_back(*args: object, **kwargs: object) -> None:
    """Before the cache is flushed, which happens without running requests, and when the engine is put to sleep."""
    for backend in _BACKENDS:
        backend.give_back()


def give_back_when_idle(*args: object, **kwargs: object) -> None:
    """Before the scheduler waits for requests, for at most a second at a time."""
    for backend in _BACKENDS:
        backend.give_back_when_idle()


def register() -> None:
    """Register the backend and the hooks; raises OtherSGLangError."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    for function in ("forward_decode", "forward_extend"):
        require(f"{_STOCK}.{function}", "self q k v layer forward_batch save_kv_cache")
    require(f"{_STOCK}.init_forward_metadata", "self forward_batch")
    require(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        "forward_mode batch_size rids req_pool_indices seq_lens extend_prefix_lens extend_seq_lens out_cache_loc "
        "encoder_lens spec_info",
    )
    transferred = "sglang.srt.disaggregation.decode_schedule_batch_mixin.ScheduleBatchDisaggregationDecodeMixin"
    require(f"{transferred}.prepare_for_prebuilt", "self")
    register_attention_backend("torch_native")(BatchedAttention)
    HookRegistry.register(f"{transferred}.prepare_for_prebuilt", forget_transferred, HookType.AFTER)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.flush_cache", give_back, HookType.BEFORE)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.on_idle", give_back_when_idle, HookType.BEFORE)
