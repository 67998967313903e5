"""Context-parallel helpers under their public names, for this process's rank in the CP group.

The layout is the zig-zag of ``slime.batching.context_parallel``; here the rank and size come from Megatron (size one
where Megatron does not run), so that loss plugins need not know them. "Local" values are those of the response tokens
whose logits this rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from slime.algorithms.reducers import Reducer, make_reducer
from slime.backends.megatron_utils.state.parallel import Ranks, context_parallel
from slime.batching import context_parallel as layout
from slime.batching.context_parallel import Range
from slime.batching.ragged_tensor import RaggedTensor

Values = TypeVar("Values", list[float], Tensor)


@dataclass(frozen=True)
class ResponseLayout:
    """The samples of a batch and the context-parallel rank ``cp``: which response tokens are local.

    Columns have one tensor per sample: whole ones [response_length], local ones [n_local].
    """

    total_lengths: Sequence[int]
    response_lengths: Sequence[int]
    cp: Ranks = field(default_factory=lambda: context_parallel())

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> ResponseLayout:
        """Return that of a batch, or of all samples of a rank, for this process."""
        return cls(batch["total_lengths"], batch["response_lengths"])

    def local(self, column: Sequence[Tensor]) -> RaggedTensor:
        """Cut a whole column: as it is where no context-parallel group cuts it. Raises ValueError for other lengths."""
        if isinstance(column, RaggedTensor) and self.cp.size == 1 and column.lengths == list(self.response_lengths):
            return column
        rows = zip(column, self.total_lengths, self.response_lengths, strict=True)
        cut = layout.slice_response_with_cp
        return RaggedTensor.of([cut(*row, cp_rank=self.cp.rank, cp_size=self.cp.size) for row in rows])

    def whole(self, column: Sequence[Tensor]) -> list[Tensor]:
        """Join the local columns of all ranks in one collective (differentiable)."""
        return layout.gather_responses_with_cp(
            column,
            self.total_lengths,
            self.response_lengths,
            cp_rank=self.cp.rank,
            cp_size=self.cp.size,
            group=self.cp.group,
        )

    def local_lengths(self) -> list[int]:
        """Return n_local of every sample."""
        rows = zip(self.total_lengths, self.response_lengths, strict=True)
        ranges = [layout.response_ranges(*row, cp_rank=self.cp.rank, cp_size=self.cp.size) for row in rows]
        return [sum(end - start for start, end in parts) for parts in ranges]

    def reducer(
        self, masks: Sequence[Tensor], denominators: Sequence[float] | Tensor | None = None, *, per_token: bool = False
    ) -> Reducer:
        """Return the reducer of local values, flat [R_local] -> scalar; see ``get_sum_of_sample_mean``.

        masks: whole. denominators: one per sample, by default the sum of its mask.
        """
        if denominators is None:
            denominators = torch.stack([mask.sum() for mask in masks])
        return make_reducer(self.local(masks), denominators, calculate_per_token_loss=per_token)


def get_logits_and_tokens_offset_with_cp(
    total_length: int, response_length: int, qkv_format: str = "thd", max_seq_len: int | None = None
) -> tuple[int, tuple[Range, Range], tuple[Range, Range], tuple[Range, Range]]:
    """Return (chunk size, position chunks, logits ranges, token ranges) of one sample on this rank.

    All are half-open position ranges from the start of the prompt; empty ranges are (0, 0). Raises ValueError for a
    ``qkv_format`` other than ``thd``, in which ``max_seq_len`` means nothing.
    """
    _check_packed(qkv_format)
    cp = context_parallel()
    return layout.logits_and_tokens_offsets(total_length, response_length, cp_rank=cp.rank, cp_size=cp.size)


def slice_with_cp(
    tokens: Tensor, pad_value: float = 0, qkv_format: str = "thd", max_seq_len: int | None = None
) -> Tensor:
    """Return this rank's positions [2 * chunk, ...] of a whole sequence [L, ...], padded with ``pad_value``.

    ``qkv_format`` and ``max_seq_len`` as in ``get_logits_and_tokens_offset_with_cp``.
    """
    _check_packed(qkv_format)
    cp = context_parallel()
    return layout.slice_with_cp(tokens, pad_value, cp_rank=cp.rank, cp_size=cp.size)


def slice_log_prob_with_cp(
    log_prob: Values,
    total_length: int,
    response_length: int,
    qkv_format: str = "thd",
    max_token_len: int | None = None,
) -> Values:
    """Return this rank's part of per-response-token values [response_length] (a list or a tensor).

    ``qkv_format`` and ``max_token_len`` as ``max_seq_len`` in ``get_logits_and_tokens_offset_with_cp``. Raises
    ValueError when there is not one value per response token.
    """
    _check_packed(qkv_format)
    cp = context_parallel()
    if torch.is_tensor(log_prob):
        return layout.slice_response_with_cp(log_prob, total_length, response_length, cp_rank=cp.rank, cp_size=cp.size)
    if len(log_prob) != response_length:
        raise ValueError(f"expected {response_length} values, one per response token, got {len(log_prob)}")
    ranges = layout.response_ranges(total_length, response_length, cp_rank=cp.rank, cp_size=cp.size)
    return [value for start, end in ranges for value in log_prob[start:end]]


def slice_samples_with_cp(
    column: Sequence[Tensor], total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> RaggedTensor:
    """``slice_log_prob_with_cp`` for several samples: a column as it is where no context-parallel group cuts it."""
    return ResponseLayout(total_lengths, response_lengths).local(column)


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """Return the values [response_length] of all response tokens from every rank's local part (differentiable)."""
    return all_gather_samples_with_cp([tensor], [total_length], [response_length])[0]


def all_gather_samples_with_cp(
    tensors: Sequence[Tensor], total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> list[Tensor]:
    """``all_gather_with_cp`` for several samples in one collective."""
    return ResponseLayout(total_lengths, response_lengths).whole(tensors)


def response_rows_and_targets(
    unconcat_tokens: Sequence[Tensor], total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> tuple[Tensor, Tensor, list[int]]:
    """Return where the packed row's logits predict response tokens, and which tokens.

    ``(rows, targets, sizes)``: int64 [R_local] row positions and token ids, sample after sample, and R_local by sample.
    """
    cp = context_parallel()
    rows: list[Tensor] = []
    targets: list[Tensor] = []
    sizes: list[int] = []
    start = 0
    for tokens, total, response in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        if cp.size == 1:
            pieces = [(start + total - response - 1, (total - response, total))]
        else:
            chunk, chunks, logits, token_ranges = get_logits_and_tokens_offset_with_cp(total, response)
            pieces = [
                (start + i * chunk + begin - chunks[i][0], token_ranges[i])
                for i, (begin, end) in enumerate(logits)
                if end > begin
            ]
        for row, (first, last) in pieces:
            rows.append(torch.arange(row, row + last - first, device=tokens.device))
            targets.append(tokens[first:last])
        sizes.append(sum(last - first for _, (first, last) in pieces))
        start += layout.zigzag_local_length(total, cp.size)
    if not rows:
        empty = torch.empty(0, dtype=torch.long, device=unconcat_tokens[0].device)
        return empty, empty, sizes
    return torch.cat(rows), torch.cat(targets).long(), sizes


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool | Sequence[float] | Tensor | None = False,
    qkv_format: object = "thd",
    max_seq_lens: object = None,
    sample_denoms: Sequence[float] | Tensor | None = None,
) -> Reducer:
    """Return the reducer of a micro-batch: local per-token values [R_local] -> scalar.

    Default: the sum over samples of ``sum(x * mask) / max(denominator, 1)``, where the denominator is
    ``sample_denoms[i]`` (the trainer passes all trained tokens of the sample's trajectory) or, without it, the
    sample's own mask sum. With ``calculate_per_token_loss``: the sum over tokens of ``x * mask``, without denominators.
    Sum the results over micro-batches and CP ranks to have the value of the batch. ``loss_masks`` are whole
    [response_length]. ``qkv_format`` and ``max_seq_lens`` as in ``get_logits_and_tokens_offset_with_cp``.

    Code for slime's main branch passes by position ``(..., loss_masks, sample_denoms, calculate_per_token_loss,
    qkv_format, max_seq_lens)``: what is no flag in the fourth place are denominators.
    """
    if not isinstance(calculate_per_token_loss, int):  # bool is one
        sample_denoms, per_token, format_ = calculate_per_token_loss, qkv_format, max_seq_lens
        calculate_per_token_loss = isinstance(per_token, int) and bool(per_token)
        qkv_format = format_ if isinstance(format_, str) else "thd" if isinstance(per_token, int) else per_token
    _check_packed(qkv_format)
    return ResponseLayout(total_lengths, response_lengths).reducer(
        loss_masks, sample_denoms, per_token=calculate_per_token_loss
    )


def _check_packed(qkv_format: object) -> None:
    """Raise ValueError for the layout with a padded row per sample, which slime <= 0.3.0 had too."""
    if qkv_format != "thd":
        raise ValueError(
            f"qkv_format={qkv_format!r}: expected 'thd'; samples are packed one after the other and never padded to "
            "max_seq_lens, so leave both arguments out"
        )
