"""From a packed row of logits to what belongs to the response tokens: logits, log-probs, entropies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.log_probs import TopPMask, log_probs_and_entropy, softcapped, top_p_log_probs
from slime.arguments.args import Args
from slime.backends.megatron_utils.state.parallel import context_parallel, tensor_parallel
from slime.backends.megatron_utils.train.cp_utils import response_rows_and_targets
from slime.backends.megatron_utils.train.data import LossBatch
from slime.batching import context_parallel as layout
from slime.batching.ragged_tensor import flat
from slime.batching.validate import IDS, OFFSETS
from slime.models.shape import logit_cap
from slime.utils.declared import with_defaults

TOP_P_COLUMNS = {IDS: "top_p_token_ids", OFFSETS: "top_p_token_offsets"}
"""Columns of a batch -> keywords of ``get_log_probs_and_entropy``."""


def top_p_keywords(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of ``get_log_probs_and_entropy`` for the top-p masks of ``batch``; empty without any."""
    return {keyword: batch[name] for name, keyword in TOP_P_COLUMNS.items() if batch.get(name) is not None}


def get_rollout_top_p_logprob_kwargs(args: Args, batch: Mapping[str, Any]) -> dict[str, Any]:
    """``top_p_keywords`` under the name that losses written for slime's main branch import from ``loss``."""
    del args  # the batch has masks where --rollout-top-p asks for them
    return top_p_keywords(batch)


def get_responses(
    logits: Tensor,
    *,
    args: Args,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_seq_lens: Sequence[int] | None = None,
    apply_temperature: bool = True,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield per sample (logits [n, V_local] float32, tokens [n] they predict).

    ``logits`` is [1, T_local, V_local]; n counts the response tokens whose logits this rank holds and may be 0. They
    are capped where the model does that (``logit_cap``) and divided by ``args.rollout_temperature`` unless
    ``apply_temperature`` is False. ``max_seq_lens`` has no effect: it is of samples in a padded row each, which
    ``packed_row`` refuses. This copies logits: for log-probs use ``get_log_probs_and_entropy``, which does not.
    """
    args = with_defaults(args)
    row = packed_row(logits)
    rows, targets, sizes = response_rows_and_targets(unconcat_tokens, total_lengths, response_lengths)
    temperature, cap = args.rollout_temperature if apply_temperature else 1.0, logit_cap(args)
    for sample_rows, sample_targets in zip(rows.split(sizes), targets.split(sizes), strict=True):
        yield softcapped(row[sample_rows].float(), cap) / temperature, sample_targets


def packed_row(outputs: Tensor) -> Tensor:
    """Return [T_local, ...] of a model's ``outputs`` [1, T_local, ...]; raises ValueError for more than one row."""
    if outputs.dim() != 3 or outputs.size(0) != 1:
        raise ValueError(
            f"expected the outputs of one row of packed samples, [1, T, ...], got {tuple(outputs.shape)}: samples in a "
            "row each, padded to max_seq_lens, are not supported"
        )
    return outputs.squeeze(0)


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Args,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    max_seq_lens: Sequence[int] | None = None,
    apply_temperature: bool = True,
    with_entropy_grad: bool | None = None,
    top_p_token_ids: Sequence[Tensor] | None = None,
    top_p_token_offsets: Sequence[Tensor] | None = None,
    overwrite_logits: bool = False,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Return (empty tensor, {"log_probs": [...], "entropy": [...]}), one float32 tensor [n_local] per sample.

    ``logits`` [1, T_local, V_local] are capped as in ``get_responses``, and divided by ``args.rollout_temperature``
    unless ``apply_temperature`` is False;
    the vocabulary may be split over the tensor-parallel group; padding columns past ``args.vocab_size`` have
    probability 0. The entropy carries a gradient ``with_entropy_grad``, by default when ``args.entropy_coef`` is not 0.
    ``max_seq_lens`` as in ``get_responses``. With top-p masks (per sample ids [k] and offsets [response_length + 1])
    log-probs are those among the kept tokens; the entropy is of all. The pair has the
    form of Megatron's loss functions, so this can be passed to its schedules; ``non_loss_data`` is what they pass and
    has no effect. With ``overwrite_logits`` their gradient takes their place in memory: for callers that do nothing
    else with them, and whose model does not read its output in its own backward pass.
    """
    args = with_defaults(args)
    del non_loss_data, max_seq_lens
    row = packed_row(logits)
    rows, targets, sizes = response_rows_and_targets(unconcat_tokens, total_lengths, response_lengths)
    temperature, cap = args.rollout_temperature if apply_temperature else 1.0, logit_cap(args)
    if with_entropy_grad is None:
        with_entropy_grad = args.entropy_coef != 0
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    if top_p_token_ids is not None and top_p_token_offsets is not None:
        log_probs = top_p_log_probs(
            row,
            targets,
            _local_top_p_mask(top_p_token_ids, top_p_token_offsets, total_lengths, response_lengths),
            rows=rows,
            tp_group=tensor_parallel().group,
            temperature=temperature,
            cap=cap,
        )
    if log_probs is None or with_entropy:
        whole, entropy = log_probs_and_entropy(
            row,
            targets,
            rows=rows,
            tp_group=tensor_parallel().group,
            vocab_size=args.vocab_size,
            chunk_size=args.log_probs_chunk_size,
            temperature=temperature,
            with_entropy=with_entropy,
            entropy_grad=with_entropy_grad,
            overwrite_logits=overwrite_logits and log_probs is None,
            cap=cap,
        )
        log_probs = whole if log_probs is None else log_probs
    result = {"log_probs": list(log_probs.split(sizes))}
    if entropy is not None:
        result["entropy"] = list(entropy.split(sizes))
    return torch.empty(0, device=logits.device), result


def _local_top_p_mask(
    token_ids: Sequence[Tensor],
    token_offsets: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> TopPMask:
    """Return the mask of the local response tokens, in the order of ``response_rows_and_targets``.

    ``token_ids`` [k_i] and ``token_offsets`` [response_length_i + 1] are of whole responses.
    """
    cp = context_parallel()
    ids: list[Tensor] = []
    sizes: list[Tensor] = []
    for kept, offsets, total, response in zip(token_ids, token_offsets, total_lengths, response_lengths, strict=True):
        counts = offsets.diff()
        if cp.size == 1:
            ids.append(kept)
            sizes.append(counts)
            continue
        bounds = offsets.tolist()
        for start, end in layout.response_ranges(total, response, cp_rank=cp.rank, cp_size=cp.size):
            ids.append(kept[bounds[start] : bounds[end]])
            sizes.append(counts[start:end])
    every = torch.cat(sizes).long() if sizes else token_offsets[0].new_zeros(0, dtype=torch.long)
    starts = torch.zeros(every.numel() + 1, dtype=torch.long, device=every.device)
    torch.cumsum(every, 0, out=starts[1:])
    return TopPMask(torch.cat(ids).long() if ids else every, starts)


def note_finite_samples(batch: dict[str, Any], *columns: Sequence[Tensor]) -> None:
    """Set ``finite_samples`` of a ``LossBatch``: whether all of a sample's values in ``columns`` are finite.

    Read only when a step turns out not to be finite, to name the samples.
    """
    if not isinstance(batch, LossBatch):
        return
    finite = torch.stack([torch.isfinite(flat(column).detach()) for column in columns]).all(dim=0)
    lengths = torch.tensor([values.size(0) for values in columns[0]], device=finite.device)
    batch.finite_samples = torch.segment_reduce(finite.float(), "min", lengths=lengths, unsafe=True, initial=1).bool()
