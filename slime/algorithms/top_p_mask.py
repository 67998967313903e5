"""Log-probabilities among the tokens that an engine sampled from (top-p replay), without a mask over the vocabulary.

With top-p sampling a token is drawn from the kept tokens ``K``, so its probability is
``exp(z_t) / sum_{j in K} exp(z_j)``:
the log-softmax of logits that are ``-inf`` outside of ``K``. Gradients: ``d log p_t / dz_j = [j = t] - q_j`` with the
renormalized ``q`` for ``j`` in ``K``, 0 elsewhere. Only the entries of the masks are read and written, so besides the
gradient of the logits itself nothing grows with the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms.log_probs import gather_ranks

_CHUNK_ENTRIES = 2**22  # mask entries worked on at a time: about 150 MiB


@dataclass(frozen=True)
class TopPMask:
    """The tokens that top-p sampling kept: row ``i`` was sampled among ``ids[offsets[i]:offsets[i + 1]]``, global ids.

    ids: int64 [entries]. offsets: int64 [T + 1], from 0. Ids of a row are distinct. The target of a row counts as kept
    even when it is not listed; an empty row keeps nothing else.
    """

    ids: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return self.offsets.numel() - 1


def top_p_log_probs(
    logits: Tensor,
    targets: Tensor,
    mask: TopPMask,
    *,
    rows: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return log-probs [T] of ``targets`` [T] (global token ids) among the tokens kept by ``mask`` under ``logits``.

    logits: [T, V_local], or [N, V_local] of which row ``rows[i]`` (distinct) belongs to ``targets[i]``; this rank's
    columns ``[vocab_start, vocab_start + V_local)``, default ``tp_rank * V_local``. They are divided by
    ``temperature``. Results are float32 (float64 for float64 logits), the same on all ranks of ``tp_group``.

    Raises ValueError for shapes that do not fit.
    """
    count = logits.size(0) if rows is None else rows.size(0)
    if logits.dim() != 2 or targets.shape != (count,) or len(mask) != count:
        raise ValueError(
            f"expected logits [T, V_local], targets [T] and a mask of T rows, got {tuple(logits.shape)}, "
            f"{tuple(targets.shape)} and {len(mask)} for {count} rows"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if vocab_start is None:
        vocab_start = 0 if tp_group is None else tp_group.rank() * logits.size(1)
    if rows is None:
        rows = torch.arange(count, device=logits.device)
    plan = _Plan(vocab_start, logits.size(1), temperature, tp_group)
    result: Tensor = _TopPLogProbs.apply(logits, targets, mask.ids, mask.offsets, rows, plan)
    return result


@dataclass(frozen=True)
class _Plan:
    """This rank's part of the vocabulary, and the temperature that logits are divided by."""

    vocab_start: int
    columns: int
    temperature: float
    tp_group: dist.ProcessGroup | None

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each id (0 where another rank has it) and whether this rank has it."""
        column = ids - self.vocab_start
        mine = (column >= 0) & (column < self.columns)
        return column.masked_fill(~mine, 0), mine


@dataclass(frozen=True)
class _Entries:
    """The local mask entries of some rows without their targets: row among all, column, scaled logit."""

    row: Tensor
    column: Tensor
    logit: Tensor


def _entries(
    logits: Tensor, targets: Tensor, ids: Tensor, offsets: Tensor, rows: Tensor, plan: _Plan
) -> Iterator[_Entries]:
    """Yield all entries, some rows at a time."""
    counts = offsets.diff()
    longest = int(counts.max()) if counts.numel() else 0
    step = max(1, _CHUNK_ENTRIES // max(longest, 1))
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    bounds = offsets[::step].tolist()
    for start, first in zip(range(0, counts.numel(), step), bounds, strict=False):
        some = counts[start : start + step]
        row = torch.repeat_interleave(torch.arange(start, start + some.numel(), device=ids.device), some)
        chunk = ids[first : first + row.numel()]
        column, mine = plan.local(chunk)
        kept = (mine & (chunk != targets[row])).nonzero().squeeze(1)
        row, column = row[kept], column[kept]
        yield _Entries(row, column, logits[rows[row], column].to(dtype) / plan.temperature)


class _TopPLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, ids: Tensor, offsets: Tensor, rows: Tensor, plan: _Plan
    ) -> Tensor:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        column, mine = plan.local(targets)
        target = (logits[rows, column].to(dtype) / plan.temperature).masked_fill(~mine, -torch.inf)
        peak = target.clone()
        for entries in _entries(logits, targets, ids, offsets, rows, plan):
            peak.scatter_reduce_(0, entries.row, entries.logit, "amax")
        peak.clamp_min_(torch.finfo(dtype).min)  # finite where this rank has nothing, or -inf - -inf = nan
        total = (target - peak).exp()
        for entries in _entries(logits, targets, ids, offsets, rows, plan):
            total.index_add_(0, entries.row, (entries.logit - peak[entries.row]).exp())
        peaks, sums, found = gather_ranks(torch.stack([peak, total, target]), plan.tp_group)
        highest = peaks.amax(0)
        lse = highest + (sums * (peaks - highest).exp()).sum(0).log()
        log_probs = found.amax(0) - lse
        ctx.plan = plan
        ctx.save_for_backward(logits, targets, ids, offsets, rows, lse, log_probs)
        return log_probs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        plan: _Plan = ctx.plan
        logits, targets, ids, offsets, rows, lse, log_probs = ctx.saved_tensors
        scaled = grad_log_probs / plan.temperature
        grad = torch.zeros_like(logits)
        for entries in _entries(logits, targets, ids, offsets, rows, plan):
            q = (entries.logit - lse[entries.row]).exp()
            grad[rows[entries.row], entries.column] = (-scaled[entries.row] * q).to(grad.dtype)
        column, mine = plan.local(targets)
        held = mine.nonzero().squeeze(1)
        grad[rows[held], column[held]] = (-scaled * torch.expm1(log_probs))[held].to(grad.dtype)
        return grad, None, None, None, None, None
