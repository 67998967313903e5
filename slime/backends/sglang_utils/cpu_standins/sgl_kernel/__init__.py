"""Stand-in for SGLang's compiled kernels on a machine without CUDA; see the README beside this package.

Any name ending in ``_cpu`` can be imported, because SGLang imports several of them unconditionally, and raises when it is
called. Every other name stays an ``AttributeError``: SGLang falls back to plain torch when such an import fails.
"""

from __future__ import annotations

from typing import Callable, NoReturn

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new cache slots into its row of ``req_to_token`` (``[pool, pool_len]``), in place.

    Request ``i`` gets ``out_cache_loc``'s next ``end_offset[i] - start_offset[i]`` entries at those columns.
    """
    slots = out_cache_loc.to(req_to_token.dtype)
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()):
        req_to_token[row, start:end] = slots[taken : taken + end - start]
        taken += end - start


def _missing_kernel(name: str) -> Callable[..., NoReturn]:
    def raise_missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no stand-in on a machine without CUDA. The model or the SGLang option in use needs a "
            "compiled kernel: run it on a GPU, or choose another option (slime's CPU engines use the torch_native backend)."
        )

    raise_missing.__name__ = name
    return raise_missing


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.endswith("_cpu"):
        return _missing_kernel(name)
    raise AttributeError(f"module 'sgl_kernel' has no attribute {name!r} (stand-in for machines without CUDA)")
