"""Rotary embedding of packed sequences without TransformerEngine's kernel, on any device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from slime.utils.autograd import Context


def rotating_packed(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return megatron's ``_apply_rotary_pos_emb_thd`` that computes the angles of a packing once, not in every layer.

    Those that turn neighboring dimensions, or reorder them, are left to ``plain``.
    """

    @functools.wraps(plain)
    def rotate(
        t: Tensor,
        cu_seqlens: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
        cp_group: Any = None,
    ) -> Tensor:
        if rotary_interleaved or multi_latent_attention or freqs.requires_grad:
            return plain(t, cu_seqlens, freqs, rotary_interleaved, multi_latent_attention, mscale, cp_group)
        known = getattr(cu_seqlens, "_rotation", None)
        if known is None or known[0] is not freqs or known[1:3] != (mscale, t.dtype):
            angles = _packed_angles(t, cu_seqlens, freqs, cp_group)
            cos, sin = ((function(angles) * mscale).to(t.dtype) for function in (torch.cos, torch.sin))
            known = (freqs, mscale, t.dtype, cos, sin)
            setattr(cu_seqlens, "_rotation", known)  # noqa: B010  (unknown to torch)
        return _Rotation.apply(t, *known[3:])

    return rotate


def _packed_angles(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_group: torch.distributed.ProcessGroup) -> Tensor:
    """Return [tokens, 1, d]: of every token of this rank, as megatron looks them up."""
    from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

    size, rank = cp_group.size(), cp_group.rank()
    bounds = cu_seqlens.tolist()
    lengths = [(end - start) // size for start, end in itertools.pairwise(bounds)]
    # A row for every token of the packing, or one for every position in a sequence.
    starts = bounds if freqs.size(0) == bounds[-1] else itertools.repeat(0)
    parts = [
        _get_thd_freqs_on_this_cp_rank(rank, size, x, freqs, start)
        for x, start in zip(t.detach().split(lengths), starts, strict=False)
    ]
    return torch.cat(parts).squeeze(1)


class _Rotation(torch.autograd.Function):
    """``[a * cos - b * sin, b * cos + a * sin]`` of the halves of the first ``d`` of the last dimension of [t, h, n].

    cos and sin are [t, 1, d]; the dimensions past ``d`` stay as they are.
    """

    @staticmethod
    def forward(ctx: Context, t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        sin_a, sin_b = sin.chunk(2, -1)
        return _rotated(t, cos, sin_a, sin_b, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        sin_a, sin_b = sin.chunk(2, -1)
        return _rotated(grad, cos, sin_b, sin_a, -1), None, None


def _rotated(t: Tensor, cos: Tensor, sin_a: Tensor, sin_b: Tensor, sign: int) -> Tensor:
    """Return ``[a * cos_a - sign * b * sin_a, b * cos_b + sign * a * sin_b, rest]`` of ``t = [a, b, rest]``."""
    half = sin_a.size(-1)
    out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    turned, rest = t.split([2 * half, t.size(-1) - 2 * half], -1)
    out_turned, out_rest = out.split([2 * half, t.size(-1) - 2 * half], -1)
    torch.mul(turned, cos, out=out_turned)
    out_turned[..., :half].addcmul_(turned[..., half:], sin_a, value=-sign)
    out_turned[..., half:].addcmul_(turned[..., :half], sin_b, value=sign)
    out_rest.copy_(rest)
    return out
