"""Torch-native attention of layers with a window whose keys have a pool of their own, and with sinks (gpt-oss).

SGLang's own reads such a pool at the places of the other one, and takes no sinks; its models refuse it by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch.nn import functional as F

from slime_engine_plugin.hook_points import require

if TYPE_CHECKING:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.server_args import ServerArgs

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_HOOKS = "sglang.srt.arg_groups.model_hook"
_CHECK = f"{_HOOKS}.handle_model_specific_adjustments"
_SINKS = "sglang.srt.models.gpt_oss.GptOssAttention"
ARCHITECTURES = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "GptOssForCausalLM")


def attending(
    original: Callable[..., torch.Tensor],
    backend: TorchNativeAttnBackend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: RadixAttention,
    forward_batch: ForwardBatch,
    save_kv_cache: bool = True,
    sinks: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """Around prefill and decoding: ``q [tokens, heads * dim]`` of all sequences, one after the other."""
    own_pool = backend.use_sliding_window_kv_pool and backend.token_to_kv_pool.layers_mapping[layer.layer_id][1]
    if sinks is None and not own_pool:
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache, **others)
    pool = backend.token_to_kv_pool
    if save_kv_cache and k is not None:
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, backend.swa_out_cache_loc), k, v)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    lengths = forward_batch.seq_lens.tolist()
    new = [1] * len(lengths) if forward_batch.forward_mode.is_decode() else forward_batch.extend_seq_lens.tolist()
    window = layer.sliding_window_size  # SGLang counts the tokens before a query's own; None or -1: no window
    window, outputs = None if window is None or window < 0 else window, []
    queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim).split(new)
    for slot, length, query in zip(forward_batch.req_pool_indices.tolist(), lengths, queries, strict=True):
        first = 0 if window is None else max(0, length - len(query) - window)
        places = backend.req_to_token_pool.req_to_token[slot, first:length]
        if own_pool:
            places = pool.translate_loc_from_full_to_swa(places)
        at = torch.arange(first, length)
        distance = at[-len(query) :, None] - at
        seen = distance >= 0 if window is None else (distance >= 0) & (distance <= window)
        outputs.append(_attend(query, keys[places], values[places], seen, sinks, layer.scaling))
    return torch.cat(outputs).view(len(q), -1)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Return ``[new, heads, dim]`` of one sequence; a sink is one more key, with its score and the value 0."""
    bias = torch.zeros(query.shape[1], *seen.shape, dtype=query.dtype).masked_fill_(~seen, float("-inf"))
    if sinks is not None:
        key, value = (F.pad(x, (0, 0, 0, 0, 1, 0)) for x in (key, value))
        bias = torch.cat([sinks.to(query.dtype)[:, None, None].expand(-1, len(query), 1), bias], -1)
    q, k, v = (x.to(query.dtype).transpose(0, 1)[None] for x in (query, key, value))
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None], scale=scale, enable_gqa=gqa)
    return out[0].transpose(0, 1)


def accepting(original: Callable[[ServerArgs], Any], server_args: ServerArgs) -> Any:
    """Around the checks of the model: torch-native attention passes as the other one of CPUs, for these alone."""
    from sglang.srt.arg_groups import model_hook

    architectures = model_hook.model_config_of(server_args).hf_config.architectures or ()
    if not set(architectures).intersection(ARCHITECTURES):
        return original(server_args)
    stock = model_hook.attention_backends_of

    def accepted(config: Any) -> tuple[str, ...]:
        return tuple("intel_amx" if name == "torch_native" else name for name in stock(config))

    model_hook.attention_backends_of = accepted
    try:
        return original(server_args)
    finally:
        model_hook.attention_backends_of = stock


def with_exact_sinks(result: None, module: Any, *args: object, **kwargs: object) -> None:
    """After a layer of gpt-oss is made: its sinks are bf16 in every model, which moves log-probs by 2e-4 in fp32."""
    module.sinks = torch.nn.Parameter(module.sinks.to(module.qkv_proj.weight.dtype), requires_grad=False)


def register() -> None:
    """Register the hooks."""
    functions = [f"{_BACKEND}.{name}" for name in ("forward_decode", "forward_extend")]
    for function in functions:
        require(function, "self q k v layer forward_batch save_kv_cache")
    require(_CHECK, "server_args")
    for name, parameters in (("attention_backends_of", "cfg"), ("model_config_of", "server_args")):
        require(f"{_HOOKS}.{name}", parameters)
    require(_SINKS, "num_heads params_dtype")
    for function in functions:
        HookRegistry.register(function, attending, HookType.AROUND)
    HookRegistry.register(_CHECK, accepting, HookType.AROUND)
    HookRegistry.register(f"{_SINKS}.__init__", with_exact_sinks, HookType.AFTER)
