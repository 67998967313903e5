"""The expert choices that engines report for routing replay: their check, and their place in a packed row."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slime.batching.context_parallel import slice_with_cp
from slime.batching.errors import TrainDataError
from slime.models.shape import moe_layer_pattern
from slime.utils.types import Sample

if TYPE_CHECKING:
    from slime.arguments.args import Args

logger = logging.getLogger(__name__)


def validate_routed_experts(args: Args, samples: Sequence[Sample]) -> None:
    """Check every sample's experts: integers [len(tokens) - 1, num_layers, topk] of MoE layers that really routed.

    With topk > 1 distinct experts are chosen per token, so a MoE layer (by ``args.moe_layer_freq``) of zeros only was
    never filled in by the engine; single tokens of zeros are warned of. Expert ids lie in [0, ``args.num_experts``).
    Raises TrainDataError naming the sample.
    """
    layers, topk = args.num_layers, args.moe_router_topk
    is_moe = np.array(moe_layer_pattern(args.moe_layer_freq, layers), dtype=bool)
    tokens = unrecorded = 0
    first = ""
    for sample in samples:
        name = f"sample index={sample.index} rollout_id={sample.rollout_id}"
        experts = sample.rollout_routed_experts
        shape = None if experts is None else tuple(np.shape(experts))
        if shape is None or len(shape) != 3 or shape[1:] != (layers, topk) or 0 in shape:
            raise TrainDataError(
                f"Invalid rollout routed-experts shape {shape} of {name}: expected (tokens - 1, {layers} layers, "
                f"top-{topk}) with {len(sample.tokens)} tokens"
            )
        ids = np.asarray(experts)
        low, high = int(ids.min()), int(ids.max())
        num_experts = args.num_experts
        if low < 0 or (num_experts is not None and high >= num_experts):
            raise TrainDataError(
                f"routed experts of {name} lie between {low} and {high}, but the model has {num_experts} experts "
                "(--num-experts): the engine serves another model, or with redundant experts"
            )
        if topk > 1:
            zeros = is_moe & ~ids.astype(bool).any(axis=2)  # [tokens, layers]
            silent = zeros.all(axis=0)
            if silent.any():
                raise TrainDataError(
                    f"routed experts of {name} are all zero in MoE layers {np.flatnonzero(silent).tolist()}: the "
                    "engine did not record them"
                )
            missing = int(zeros.any(axis=1).sum())
            tokens, unrecorded = tokens + len(ids), unrecorded + missing
            first = first or name * bool(missing)
    if unrecorded:
        logger.warning(
            "%d of %d tokens (the first in %s) have zeros for routed experts: the engine did not record them, and "
            "replay sends them to expert 0 alone, with a part of its weight",
            unrecorded,
            tokens,
            first,
        )


def compact_experts(experts: object, num_experts: int | None) -> Any:
    """Return expert ids in the smallest type that holds them: they are the bulk of a rollout's bytes."""
    if num_experts is None:
        return experts
    return np.asarray(experts).astype(np.uint8 if num_experts <= 256 else np.int16)


def rows_of_samples(total_lengths: Sequence[int], row_length: int, *, cp_rank: int, cp_size: int) -> Tensor:
    """Return which token every place of a packed row (zig-zag layout) holds: int64 [row_length].

    Tokens are counted through all samples of the micro-batch, in order; padding is -1.
    """
    pieces, start = [], 0
    for total in total_lengths:
        tokens = torch.arange(start, start + total)
        pieces.append(slice_with_cp(tokens, -1, cp_rank=cp_rank, cp_size=cp_size))
        start += total
    row = torch.cat(pieces)
    return F.pad(row, (0, row_length - row.size(0)), value=-1)


def has_successor(rows: Tensor, total_lengths: Sequence[int]) -> Tensor:
    """Return which of ``rows`` (see ``rows_of_samples``) hold a token that another one of its sample follows: bool."""
    last = torch.tensor(total_lengths).cumsum(0) - 1
    return (rows >= 0) & ~torch.isin(rows, last)


def rows_of_experts(experts: Sequence[Any], rows: Tensor, layers: Sequence[int], *, num_experts: int) -> Tensor:
    """Return the engine's choices for the places of a packed row: [len(layers), len(rows), topk].

    experts: per sample [total_length - 1, num_layers, topk] (tensor or array; the engine never saw its last token as
    input). rows: what ``rows_of_samples`` returned, or a part of it. Places without a choice of the engine (padding,
    last tokens) get experts in turn, so that none of them is flooded.
    """
    picked = [torch.as_tensor(sample)[:, list(layers)] for sample in experts]
    last = torch.full((1, *picked[0].shape[1:]), -1, dtype=torch.int32)
    known = torch.cat([piece for sample in picked for piece in (sample.to(torch.int32), last)] + [last])
    chosen = known[rows]  # -1 for padding is the last entry, which is unknown
    unknown = chosen[:, 0, 0] < 0 if layers else torch.zeros(len(rows), dtype=torch.bool)
    topk = chosen.size(-1)
    in_turn = torch.arange(int(unknown.sum()) * topk, dtype=torch.int32).reshape(-1, 1, topk) % num_experts
    chosen[unknown] = in_turn.expand(-1, len(layers), -1)
    return chosen.transpose(0, 1)
