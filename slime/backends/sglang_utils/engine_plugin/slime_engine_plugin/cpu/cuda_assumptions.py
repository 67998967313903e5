"""Replace what SGLang assumes of CUDA, on a machine without it: weight checker, routed and shared experts.

``/weights_checker`` assumes CUDA: it synchronizes the CUDA device, moves chunks there to compare them, and takes its
snapshot with ``.detach().cpu()``, which on CPU is no copy but the live weights. Without ``snapshot``, ``compare`` would
pass for any weights.

``--enable-return-routed-experts`` keeps the experts of every token in host memory that it registers with CUDA for
faster copies. On CPU there is nothing to copy from, and nothing to register with.

Shared experts behind a gate (Qwen2-MoE and its successors) are added by a Triton kernel on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

if TYPE_CHECKING:
    from sglang.srt.utils.weight_checker import WeightChecker
    from sglang.srt.utils.weight_checker_comparator import RawComparable

_CHECKER = "sglang.srt.utils.weight_checker.WeightChecker"


def snapshot(checker: WeightChecker) -> None:
    """Replace ``WeightChecker._snapshot``: keep copies."""
    checker._snapshot_tensors = {name: tensor.data.detach().clone() for name, tensor in checker._model_state()}


def iter_chunks(comparable: RawComparable) -> Iterator[tuple[torch.Tensor, None]]:
    """Replace ``RawComparable.iter_chunks``: the same chunks, left where they are."""
    from sglang.srt.utils.weight_checker_comparator import CHUNK_NUMEL

    flat = comparable.tensor.reshape(-1)
    for start in range(0, flat.numel(), CHUNK_NUMEL):
        yield flat[start : start + CHUNK_NUMEL], None


def without_cuda_synchronize(handle: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Around ``WeightChecker.handle``: ``torch.cuda.synchronize`` is a no-op for the duration of the call."""
    synchronize, torch.cuda.synchronize = torch.cuda.synchronize, lambda device=None: None
    try:
        return handle(*args, **kwargs)
    finally:
        torch.cuda.synchronize = synchronize


def without_registration(buffer: torch.Tensor, registration_granularity_bytes: int | None = None) -> None:
    """Replace ``_cuda_host_register``: host memory is all there is."""


def add_gated_shared_experts(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    output: torch.Tensor,
    do_add: bool,
) -> None:
    """Replace ``_launch_fused_gate_sigmoid_mul``: ``output (+)= sigmoid(hidden @ gate) * shared``, in place.

    hidden_states, shared_output, output: [tokens, hidden]; gate_weight: [hidden].
    """
    gated = torch.sigmoid(hidden_states @ gate_weight)[:, None] * shared_output
    output.add_(gated) if do_add else output.copy_(gated)


def register() -> None:
    """Register the hooks."""
    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.common._cuda_host_register", without_registration, HookType.REPLACE
    )
    HookRegistry.register(
        "sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul",
        add_gated_shared_experts,
        HookType.REPLACE,
    )
    HookRegistry.register(f"{_CHECKER}._snapshot", snapshot, HookType.REPLACE)
    HookRegistry.register(f"{_CHECKER}.handle", without_cuda_synchronize, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.utils.weight_checker_comparator.RawComparable.iter_chunks", iter_chunks, HookType.REPLACE
    )
