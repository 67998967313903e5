"""Send the routed experts of prompts from prefill engines to decode engines, with the key-value cache.

SGLang keeps the experts of every token in host memory, in the row of its slot in the key-value cache, and reads a
request's rows when it has finished. A decode engine did not compute the prompt: its rows there are those of what was in
these slots before. So the rows become one more state that goes with the pages of the cache. Rows are also kept with the
caches of retracted requests, which get other slots, and read of requests whose first token is the last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime_engine_plugin.hook_points import OtherSGLangError, require

if TYPE_CHECKING:
    import torch
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

_NIXL = "sglang.srt.disaggregation.nixl.conn.NixlKVManager"
_PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_SETUP_PARAMETERS = "kv_args token_to_kv_pool draft_token_to_kv_pool total_kv_layers req_to_token_pool"
_SEND_PARAMETERS = """self peer_name src_data_ptrs dst_data_ptrs item_lens prefill_data_indices dst_data_indices
    dst_gpu_id notif state_type src_mem_kind dst_mem_kind force_flat bypass_prepped src_layer_ids
    dst_layer_ids dst_item_lens"""


def rows_of_slots() -> torch.Tensor:
    """Return the experts of every slot of the cache: int32 [slots, layers, topk], in host memory."""
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    rows: torch.Tensor = get_global_experts_capturer().host_cache.buffer
    return rows


def add_experts(result: None, kv_args: KVArgs, *args: object, **kwargs: object) -> None:
    """Add the rows to what is sent, after ``setup_state_kv_args``.

    They have the name of a state that is addressed by the pages of the whole sequence and is one buffer, not keys and
    values: both transports can send it.
    """
    from sglang.srt.disaggregation.base.conn import StateType
    from sglang.srt.disaggregation.utils import append_state_component

    rows = rows_of_slots()
    page = rows[0].nbytes * kv_args.page_size
    append_state_component(kv_args, StateType.QSA_COMPRESSED, [rows.data_ptr()], [rows.nbytes], [page])


def register_as_host_memory(register: Callable[..., Any], manager: Any) -> None:
    """Around ``NixlKVManager.register_buffer_to_engine``, which says of all states that they are in a GPU's memory."""
    pointer, size = manager.kv_args.state_data_ptrs[-1][0], manager.kv_args.state_data_lens[-1]
    manager.kv_args.state_data_lens[-1] = [0]  # leaves it out
    register(manager)
    manager.kv_args.state_data_lens[-1] = size
    if not manager.agent.register_memory([(pointer, size[0], 0, "")], "DRAM"):
        raise RuntimeError("nixl did not register the memory of routed experts")


def send_from_host_memory(send: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``NixlKVManager._send_kvcache_generic``: it is host memory on both sides."""
    if kwargs.get("src_data_ptrs") == manager.kv_args.state_data_ptrs[-1]:
        kwargs = {**kwargs, "src_mem_kind": "DRAM", "dst_mem_kind": "DRAM"}
    return send(manager, *args, **kwargs)


def collect_of_first_tokens(processor: Any, batch: ScheduleBatch) -> None:
    """Before ``process_batch_result_prebuilt``, which frees the slots of requests that the first token ends."""
    for request in batch.reqs:
        request.update_finish_state()
        if request.finished():
            processor._maybe_collect_routed_experts(request)


def keep(backup: Callable[..., bool], request: Req, tree_cache: Any, pool: Any, allocator: Any, backend: str) -> bool:
    """Around ``retraction_backup``: copy the rows too."""
    request.slime_experts = rows_of_slots()[_slots(request, pool)]
    return backup(request, tree_cache, pool, allocator, backend)


def bring_back(
    restore: Callable[..., None], request: Req, tree_cache: Any, pool: Any, allocator: Any, backend: str
) -> None:
    """Around ``retraction_restore``: the rows go to the request's new slots."""
    restore(request, tree_cache, pool, allocator, backend)
    rows_of_slots()[_slots(request, pool)] = request.slime_experts
    del request.slime_experts


def _slots(request: Req, pool: Any) -> torch.Tensor:
    slots: torch.Tensor = pool.req_to_token[request.kv.req_pool_idx, : request.seqlen - 1]
    return slots.cpu().long()


def register() -> None:
    """Register the hooks in prefill and decode engines that return experts.

    Raises SystemExit where they do not fit this SGLang: replies would have experts of other requests.
    """
    words = {word.partition("=")[0] for word in sys.argv}
    if not {"--disaggregation-mode", "--enable-return-routed-experts"} <= words:
        return
    backup = "req tree_cache req_to_token_pool token_to_kv_pool_allocator backend"
    hooks = [
        ("sglang.srt.disaggregation.utils.setup_state_kv_args", _SETUP_PARAMETERS, add_experts, HookType.AFTER),
        (f"{_PROCESSOR}.process_batch_result_prebuilt", "self batch", collect_of_first_tokens, HookType.BEFORE),
        ("sglang.srt.mem_cache.common.retraction_backup", backup, keep, HookType.AROUND),
        ("sglang.srt.mem_cache.common.retraction_restore", backup, bring_back, HookType.AROUND),
    ]
    if "--disaggregation-transfer-backend=nixl" in sys.argv:
        hooks.append((f"{_NIXL}.register_buffer_to_engine", "self", register_as_host_memory, HookType.AROUND))
        hooks.append((f"{_NIXL}._send_kvcache_generic", _SEND_PARAMETERS, send_from_host_memory, HookType.AROUND))
    for target, parameters, hook, kind in hooks:
        try:
            require(target, parameters)
        except OtherSGLangError as e:
            raise SystemExit(f"slime cannot send the experts of prompts with this SGLang: {e}") from e
        HookRegistry.register(target, hook, kind)
