"""Make SGLang's weight checker tell the truth on a machine without CUDA.

``/weights_checker`` assumes CUDA: it synchronises the CUDA device, moves chunks there to compare them, and takes its
snapshot with ``.detach().cpu()``, which on CPU is no copy but the live weights. Without the last of the hooks below,
``compare`` would pass for any weights whatever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_CHECKER = "sglang.srt.utils.weight_checker.WeightChecker"


def snapshot(checker: Any) -> None:
    """Replace ``WeightChecker._snapshot``: keep copies."""
    checker._snapshot_tensors = {name: tensor.data.detach().clone() for name, tensor in checker._model_state()}


def iter_chunks(comparable: Any) -> Iterator[tuple[torch.Tensor, None]]:
    """Replace ``RawComparable.iter_chunks``: the same chunks, left where they are."""
    from sglang.srt.utils.weight_checker_comparator import CHUNK_NUMEL

    flat = comparable.tensor.reshape(-1)
    for start in range(0, flat.numel(), CHUNK_NUMEL):
        yield flat[start : start + CHUNK_NUMEL], None


def without_cuda_synchronize(handle: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``WeightChecker.handle``: ``torch.cuda.synchronize`` is a no-op for the duration of the call."""
    synchronize, torch.cuda.synchronize = torch.cuda.synchronize, lambda device=None: None
    try:
        return handle(*args, **kwargs)
    finally:
        torch.cuda.synchronize = synchronize


def register() -> None:
    """Register the hooks."""
    HookRegistry.register(f"{_CHECKER}._snapshot", snapshot, HookType.REPLACE)
    HookRegistry.register(f"{_CHECKER}.handle", without_cuda_synchronize, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.utils.weight_checker_comparator.RawComparable.iter_chunks", iter_chunks, HookType.REPLACE
    )
