"""Log-probabilities and entropy from (vocabulary-parallel) logits, in chunks of rows.

For logits ``z`` (capped, and divided by the temperature): ``log p_t = z_t - lse(z)`` and
``H = lse(z) - sum_j p_j z_j``. Gradients: ``d log p_t / dz_j = [j = t] - p_j`` and
``dH / dz_j = -p_j (log p_j + H)``. Only ``lse`` and ``H`` (one number per row) are kept for backward; probabilities are
recomputed chunk by chunk, so besides the gradient itself nothing larger than ``chunk_size x V_local`` exists in either
direction, and where nothing else needs the logits the gradient takes their place in memory. The collective is one
all-gather of four numbers per row, and there is none in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_ELEMENTS_CPU = 2**20  # 4 MiB of float32: a chunk stays in the cache between the passes over it
_CHUNK_ELEMENTS_DEVICE = 2**26  # 256 MiB of float32: large enough that launches do not matter
_LOG_OF_ZERO = -1e4  # its exp is 0 in every dtype, and unlike -inf times 0 it is 0 again
_BUFFERS = 2  # of the size of a chunk that are alive at most: log-probabilities and probabilities; and slopes of caps
_CHUNK_ENTRIES = 2**22  # mask entries worked on at a time: about 150 MiB


def log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    chunk_size: int = -1,
    with_entropy: bool = False,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    rows: Tensor | None = None,
    vocab_size: int | None = None,
    overwrite_logits: bool = False,
    cap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return ``(log_probs [T], entropy [T] or None)`` of ``targets`` [T] (global token ids) under ``logits``.

    logits: [T, V_local], any floating dtype; this rank's columns ``[vocab_start, vocab_start + V_local)``.
    rows: int64 [T], distinct; logits are then [N, V_local] and row ``rows[i]`` belongs to ``targets[i]``. Selecting
        here instead of indexing the logits before spares a copy of them.
    tp_group: the group that shares the vocabulary; None when this process holds all of it.
    vocab_start: first column's token id; default ``tp_rank * V_local``.
    vocab_size: real vocabulary; columns at and past it are padding and count as ``-inf`` (None: no padding).
    chunk_size: largest number of rows per chunk; <= 0 and more than is of use choose one from V_local. All buffers
        together stay below ``1.5 * chunk_size * V_local`` float32.
    temperature: logits are divided by it.
    cap: before that, they become ``cap * tanh(logits / cap)`` (Gemma's ``final_logit_softcapping``).
    entropy_grad: without it the entropy is detached.
    overwrite_logits: backward writes the gradient into the memory of the logits (if they are contiguous) instead of
        making one of their size. Autograd refuses (RuntimeError) if another operation kept them for its own backward.

    Results are float32 (float64 for float64 logits), the same on all ranks of the group. A target outside of the
    vocabulary gives ``-inf``. Raises ValueError for shapes that do not fit and a temperature that is not positive.
    """
    count = logits.size(0) if rows is None else rows.size(0)
    if logits.dim() != 2 or targets.shape != (count,):
        raise ValueError(
            f"expected logits [T, V_local] and {'as many' if rows is None else 'one per row:'} targets [T], "
            f"got {tuple(logits.shape)} and {tuple(targets.shape)}" + (f" for {count} rows" if rows is not None else "")
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    buffers = _BUFFERS + (cap is not None)
    width = logits.size(1)
    if vocab_start is None:
        vocab_start = 0 if tp_group is None else tp_group.rank() * width
    plan = _Plan(
        chunk_size=_rows_per_chunk(chunk_size, width, logits.device, buffers),
        vocab_start=vocab_start,
        columns=width if vocab_size is None else min(max(vocab_size - vocab_start, 0), width),
        temperature=temperature,
        with_entropy=with_entropy,
        entropy_grad=with_entropy and entropy_grad,
        tp_group=tp_group,
        overwrite_logits=overwrite_logits and logits.is_contiguous(),
        cap=cap,
    )
    log_probs, entropy = _LogProbsAndEntropy.apply(logits, targets, rows, plan)
    return log_probs, (entropy if with_entropy else None)


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: dist.ProcessGroup | None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``log_probs_and_entropy`` with the signature and shapes of slime <= 0.3.1.

    logits [T, V_local] (divided by the temperature already), tokens [T]; returns log-probs [T, 1] (of no rows [0]) and
    the entropy [T], detached without ``with_entropy_grad``. ``tp_group`` None is torch's default group where there is
    one: all processes share the vocabulary. ``log_prob_keep_mask`` (bool [T, V_local]): what is False in it has
    probability 0, except for the tokens themselves; the entropy is of all. Raises ValueError for a mask of other shape.
    """
    if tp_group is None and dist.is_available() and dist.is_initialized():
        tp_group = dist.group.WORLD
    log_probs = entropy = None
    if log_prob_keep_mask is not None:
        kept = _keep_only(logits, tokens, log_prob_keep_mask, 0 if tp_group is None else tp_group.rank())
        log_probs, _ = log_probs_and_entropy(kept, tokens, tp_group=tp_group, chunk_size=chunk_size)
    if log_probs is None or with_entropy:
        whole, entropy = log_probs_and_entropy(
            logits,
            tokens,
            tp_group=tp_group,
            chunk_size=chunk_size,
            with_entropy=with_entropy,
            entropy_grad=with_entropy_grad,
        )
        log_probs = whole if log_probs is None else log_probs
    return (log_probs.unsqueeze(-1) if log_probs.numel() else log_probs), entropy


def _keep_only(logits: Tensor, tokens: Tensor, keep: Tensor, tp_rank: int) -> Tensor:
    """A copy of ``logits`` with -inf where ``keep`` is False, except in the columns of ``tokens``."""
    if keep.shape != logits.shape:
        raise ValueError(f"log_prob_keep_mask: expected the shape {tuple(logits.shape)}, got {tuple(keep.shape)}")
    vocabulary = torch.arange(logits.size(1), device=logits.device) + tp_rank * logits.size(1)
    return logits.masked_fill(~(keep.bool() | (vocabulary == tokens.unsqueeze(1))), -torch.inf)


def default_chunk_size(vocab_local: int, device: torch.device) -> int:
    """Return the rows per chunk that keep a chunk at 4 MiB (CPU) or 256 MiB (other devices) of float32."""
    elements = _CHUNK_ELEMENTS_CPU if device.type == "cpu" else _CHUNK_ELEMENTS_DEVICE
    return max(1, elements // max(vocab_local, 1))


def softcapped(logits: Tensor, cap: float | None) -> Tensor:
    """Return ``cap * tanh(logits / cap)``; the logits themselves without a cap."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _rows_per_chunk(limit: int, vocab_local: int, device: torch.device, buffers: int) -> int:
    """Rows that are worked on at a time; with a limit so many that all buffers together are 1.5 times its size."""
    rows = default_chunk_size(vocab_local, device)
    return rows if limit <= 0 else max(1, min(rows, limit * 3 // (2 * buffers)))


@dataclass(frozen=True)
class _Plan:
    """The values that are the same for all chunks."""

    chunk_size: int
    vocab_start: int
    columns: int
    temperature: float
    with_entropy: bool
    entropy_grad: bool
    tp_group: dist.ProcessGroup | None
    overwrite_logits: bool
    cap: float | None = None

    def spans(self, count: int) -> list[slice]:
        return [slice(start, min(start + self.chunk_size, count)) for start in range(0, count, self.chunk_size)]

    def scaled(self, logits: Tensor, rows: Tensor | None, span: slice, out: Tensor) -> Tensor:
        """Write the chunk's capped logits / temperature, real columns only, into ``out``; return them [n, columns]."""
        chunk = out[: span.stop - span.start]
        if rows is None:
            chunk.copy_(logits[span, : self.columns])
        elif logits.dtype == out.dtype and logits.size(1) == self.columns:
            torch.index_select(logits, 0, rows[span], out=chunk)
        else:
            chunk.copy_(logits.index_select(0, rows[span])[:, : self.columns])
        if self.cap is not None:
            chunk.div_(self.cap).tanh_().mul_(self.cap)
        return chunk if self.temperature == 1.0 else chunk.div_(self.temperature)

    def slope(self, z: Tensor) -> Tensor | None:
        """Return the derivative of the cap where it has made ``z``: ``1 - tanh^2``; None without one."""
        return None if self.cap is None else _cap_slope(z, self.cap / self.temperature)

    def buffer(self, count: int, like: Tensor) -> Tensor:
        """Return memory for a chunk's numbers, in the dtype of ``like``."""
        return like.new_empty(min(self.chunk_size, count), self.columns)

    def local_targets(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each target (0 where another rank has it) and whether this rank has it."""
        column = targets - self.vocab_start
        mine = (column >= 0) & (column < self.columns)
        return column.masked_fill(~mine, 0), mine


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, rows: Tensor | None, plan: _Plan) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        count = targets.size(0)
        stats = torch.empty(4, count, dtype=dtype, device=logits.device)
        buffer = plan.buffer(count, stats)
        for span in plan.spans(count):
            z = plan.scaled(logits, rows, span, buffer)
            stats[:, span] = _row_statistics(z, targets[span], plan)
        lse, log_probs, entropy = _combine(gather_ranks(stats, plan.tp_group))
        ctx.plan = plan
        ctx.has_rows = rows is not None
        ctx.save_for_backward(logits, targets, lse, entropy, *([rows] if rows is not None else []))
        if not plan.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None]:
        plan: _Plan = ctx.plan
        logits, targets, lse, entropy, *rest = ctx.saved_tensors
        rows = rest[0] if ctx.has_rows else None
        # Detached, not .data: the write counts as a change of the logits, so that autograd knows of it.
        grad = logits.detach() if plan.overwrite_logits else torch.empty_like(logits)
        # What is not overwritten below: the padding, and the rows that were not asked for.
        grad[:, plan.columns :] = 0
        if rows is not None:
            grad.index_fill_(0, _other_rows(rows, logits.size(0)), 0)
        count = targets.size(0)
        in_place = rows is None and grad.dtype == lse.dtype
        buffer = grad if in_place else plan.buffer(count, lse)
        for span in plan.spans(count):
            z = plan.scaled(logits, rows, span, grad[span, : plan.columns] if in_place else buffer)
            slope = plan.slope(z)
            g = grad_log_probs[span].unsqueeze(1) / plan.temperature
            z.sub_(lse[span].unsqueeze(1))  # log p
            if plan.entropy_grad:
                # dlogp + dH: -p * (g + h * (log p + H))
                h = grad_entropy[span].unsqueeze(1) / plan.temperature
                p = z.clamp_(min=_LOG_OF_ZERO).exp()
                z.mul_(-h).sub_(entropy[span].unsqueeze(1) * h + g).mul_(p)
                del p
            else:
                z.exp_().mul_(-g)
            column, mine = plan.local_targets(targets[span])
            if plan.columns:
                z.scatter_add_(1, column.unsqueeze(1), g * mine.unsqueeze(1))
            if slope is not None:
                z.mul_(slope)
            if rows is not None:
                grad[:, : plan.columns].index_copy_(0, rows[span], z.to(grad.dtype))
            elif not in_place:
                grad[span, : plan.columns] = z
        return grad, None, None, None


def _cap_slope(z: Tensor, cap: float) -> Tensor:
    """Return ``1 - (z / cap)^2``: how ``z = cap * tanh(x / cap)`` changes with ``x``."""
    return (z / cap).square_().neg_().add_(1)


def _other_rows(rows: Tensor, count: int) -> Tensor:
    """Return the numbers below ``count`` that are not in ``rows``, without asking the device how many there are."""
    selected = torch.zeros(count, dtype=torch.bool, device=rows.device)
    selected[rows] = True
    return selected.to(torch.int8).argsort()[: count - rows.size(0)]


def _row_statistics(z: Tensor, targets: Tensor, plan: _Plan) -> Tensor:
    """[4, n]: this rank's maximum, sum exp(z - max), sum exp(z - max) * (z - max), target logit (-inf if not here).

    Overwrites ``z``.
    """
    n = z.size(0)
    stats = z.new_zeros(4, n)
    if plan.columns == 0:  # nothing but padding on this rank
        stats[0] = stats[3] = -torch.inf
        return stats
    column, mine = plan.local_targets(targets)
    stats[3] = z.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill(~mine, -torch.inf)
    peak = z.amax(1).clamp_min(torch.finfo(z.dtype).min)  # finite even where every logit is -inf, or -inf - -inf = nan
    stats[0] = peak
    z.sub_(peak.unsqueeze(1))
    if plan.with_entropy:
        p = z.clamp_(min=_LOG_OF_ZERO).exp()
        stats[1] = p.sum(1)
        stats[2] = p.mul_(z).sum(1)
    else:
        stats[1] = z.exp_().sum(1)
    return stats


def gather_ranks(stats: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Collect every rank's [k, n] into [k, tp, n]."""
    if group is None or group.size() == 1:
        return stats.unsqueeze(1)
    parts = [torch.empty_like(stats) for _ in range(group.size())]
    dist.all_gather(parts, stats, group=group)
    return torch.stack(parts, dim=1)


def _combine(stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[4, tp, n] -> global lse [n], log-prob of the target [n], entropy [n] (of use where the third number is).

    With z' = z - max: ``H = log sum exp z' - sum p z'``, which unlike ``lse - sum p z`` does not cancel.
    """
    peaks, sums, weighted, target = stats
    peak = peaks.amax(0)
    shift = (peaks - peak).clamp_min(_LOG_OF_ZERO)  # a rank may hold nothing but padding
    scale = shift.exp()
    total = (sums * scale).sum(0)
    log_total = total.log()
    lse = peak + log_total
    return lse, target.amax(0) - lse, log_total - ((weighted + sums * shift) * scale).sum(0) / total


# Log-probabilities among the tokens that an engine sampled from (top-p replay), without a mask over the vocabulary.
# With top-p sampling a token is drawn from the kept tokens K, so its probability is exp(z_t) / sum_{j in K} exp(z_j):
# the log-softmax of logits that are -inf outside of K. Gradients: d log p_t / dz_j = [j = t] - q_j with renormalized q
# for j in K, 0 elsewhere. Only the entries of the masks are read and written, so besides the gradient of the logits
# itself nothing grows with the vocabulary.


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
    cap: float | None = None,
) -> Tensor:
    """Return log-probs [T] of ``targets`` [T] (global token ids) among the tokens kept by ``mask`` under ``logits``.

    logits: [T, V_local], or [N, V_local] of which row ``rows[i]`` (distinct) belongs to ``targets[i]``; this rank's
    columns ``[vocab_start, vocab_start + V_local)``, default ``tp_rank * V_local``. They are capped as in
    ``log_probs_and_entropy`` and divided by ``temperature``. Results are float32 (float64 for float64 logits), the
    same on all ranks of ``tp_group``.

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
    plan = _TopPPlan(vocab_start, logits.size(1), temperature, tp_group, cap)
    result: Tensor = _TopPLogProbs.apply(logits, targets, mask.ids, mask.offsets, rows, plan)
    return result


@dataclass(frozen=True)
class _TopPPlan:
    """This rank's part of the vocabulary, the temperature that logits are divided by, and their cap."""

    vocab_start: int
    columns: int
    temperature: float
    tp_group: dist.ProcessGroup | None
    cap: float | None

    def scaled(self, picked: Tensor) -> Tensor:
        """Return picked logits capped and divided by the temperature."""
        return softcapped(picked, self.cap) / self.temperature

    def through_cap(self, gradient: Tensor, scaled: Tensor) -> Tensor:
        """Return the gradient of logits from that of the capped ones; ``scaled``: what these became."""
        return gradient if self.cap is None else gradient * _cap_slope(scaled, self.cap / self.temperature)

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
    logits: Tensor, targets: Tensor, ids: Tensor, offsets: Tensor, rows: Tensor, plan: _TopPPlan
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
        yield _Entries(row, column, plan.scaled(logits[rows[row], column].to(dtype)))


class _TopPLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, ids: Tensor, offsets: Tensor, rows: Tensor, plan: _TopPPlan
    ) -> Tensor:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        column, mine = plan.local(targets)
        target = plan.scaled(logits[rows, column].to(dtype)).masked_fill(~mine, -torch.inf)
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
        plan: _TopPPlan = ctx.plan
        logits, targets, ids, offsets, rows, lse, log_probs = ctx.saved_tensors
        scaled = grad_log_probs / plan.temperature
        grad = torch.zeros_like(logits)
        for entries in _entries(logits, targets, ids, offsets, rows, plan):
            q = (entries.logit - lse[entries.row]).exp()
            passed = plan.through_cap(-scaled[entries.row] * q, entries.logit)
            grad[rows[entries.row], entries.column] = passed.to(grad.dtype)
        column, mine = plan.local(targets)
        held = mine.nonzero().squeeze(1)
        passed = (-scaled * torch.expm1(log_probs))[held]
        passed = plan.through_cap(passed, plan.scaled(logits[rows[held], column[held]].to(passed.dtype)))
        grad[rows[held], column[held]] = passed.to(grad.dtype)
        return grad, None, None, None, None, None


@dataclass(frozen=True)
class Vocabulary:
    """This rank's part of the vocabulary: its log-probs of any ids, and draws. Nothing has a gradient.

    Logits are [N, V_local], capped as in ``log_probs_and_entropy`` and divided by ``temperature``. Their first
    ``columns`` columns are the ids from ``start`` on, the others padding; ``group`` shares the vocabulary. Results are
    the same on all of its ranks. ``chunk`` rows are worked on at a time: their logits are copied in float32, for draws
    in float64.
    """

    start: int
    columns: int
    temperature: float
    group: dist.ProcessGroup | None = None
    cap: float | None = None

    def log_probs(self, logits: Tensor, rows: Tensor, ids: Tensor, chunk: int) -> Tensor:
        """Return float32 [n, k], the log-probs of ``ids`` [n, k] under the rows ``rows`` [n] of ``logits``."""
        found = ids.new_empty(ids.shape, dtype=torch.float32)
        for first in range(0, rows.size(0), chunk):
            span = slice(first, first + chunk)
            z = self._scaled(logits, rows[span])
            found[span] = self._at(z, ids[span]) - self._normalizer(z).unsqueeze(1)
        return found

    def sample(self, logits: Tensor, rows: Tensor, uniform: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        """Draw a token for each of ``uniform`` [n, k], with replacement; return (int64 ids, log-probs), each [n, k].

        By inversion: the token whose part of the cumulative distribution, in the order of ids, holds the number.
        """
        ids = uniform.new_empty(uniform.shape, dtype=torch.int64)
        log_probs = uniform.new_empty(uniform.shape, dtype=torch.float32)
        for first in range(0, rows.size(0), chunk):
            span = slice(first, first + chunk)
            z = self._scaled(logits, rows[span])
            normalizer = self._normalizer(z)
            ids[span] = self._inverted((z - normalizer.unsqueeze(1)).double().exp(), uniform[span])
            log_probs[span] = self._at(z, ids[span]) - normalizer.unsqueeze(1)
        return ids, log_probs

    def _scaled(self, logits: Tensor, rows: Tensor) -> Tensor:
        return softcapped(logits[rows, : self.columns].float(), self.cap) / self.temperature

    def _normalizer(self, z: Tensor) -> Tensor:
        """Return log sum exp over the whole vocabulary, [n]."""
        local = torch.logsumexp(z, 1) if self.columns else z.new_full((z.size(0),), -torch.inf)
        return torch.logsumexp(gather_ranks(local.unsqueeze(0), self.group)[0], 0)

    def _at(self, z: Tensor, ids: Tensor) -> Tensor:
        """Return the logits of ``ids`` [n, k], whichever rank has them."""
        column = ids - self.start
        mine = (column >= 0) & (column < self.columns)
        if self.columns:
            found = z.gather(1, column.clamp(0, self.columns - 1)).masked_fill(~mine, -torch.inf)
        else:
            found = z.new_full(ids.shape, -torch.inf)
        return gather_ranks(found.reshape(1, -1), self.group)[0].amax(0).view_as(found)

    def _inverted(self, probabilities: Tensor, uniform: Tensor) -> Tensor:
        """Return the ids at ``uniform`` [n, k] of the cumulative distribution of ``probabilities`` [n, columns]."""
        masses = gather_ranks(probabilities.sum(1).unsqueeze(0), self.group)[0]  # [tp, n]
        ends = masses.cumsum(0)
        scaled = uniform * ends[-1].unsqueeze(1)
        rank = 0 if self.group is None else self.group.rank()
        begin = ends[rank - 1] if rank else torch.zeros_like(ends[0])
        last = masses.size(0) - 1 - masses.flip(0).ne(0).int().argmax(0)  # rounding may put a number past the end
        owner = torch.minimum((scaled.unsqueeze(0) >= ends.unsqueeze(2)).sum(0), last.unsqueeze(1))
        column = torch.zeros_like(owner)
        if self.columns:
            inside = torch.searchsorted(probabilities.cumsum(1), scaled - begin.unsqueeze(1), right=True)
            positive = self.columns - 1 - probabilities.flip(1).ne(0).int().argmax(1)
            column = torch.minimum(inside, positive.unsqueeze(1)) + self.start
        found = column.masked_fill(owner != rank, -1)
        return gather_ranks(found.reshape(1, -1), self.group)[0].amax(0).view_as(found)
