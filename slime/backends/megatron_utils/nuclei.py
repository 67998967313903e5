"""Top-p replay in the trainer: the nuclei of the response tokens whose logits this rank holds."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.nucleus import Nuclei
from slime.backends.megatron_utils.parallel import context_parallel
from slime.batching import context_parallel as layout
from slime.batching.columns import RolloutShard
from slime.batching.nuclei import IDS, OFFSETS, check_nuclei
from slime.batching.validate import sample_namer

NUCLEUS_COLUMNS = {IDS: "top_p_token_ids", OFFSETS: "top_p_token_offsets"}
"""Columns of a batch -> keywords of ``get_log_probs_and_entropy``."""


def nucleus_keywords(batch: Mapping[str, Any]) -> dict[str, Sequence[Tensor]]:
    """Return the keywords that let ``get_log_probs_and_entropy`` replay the nuclei of ``batch``; none without any."""
    return {keyword: batch[name] for name, keyword in NUCLEUS_COLUMNS.items() if batch.get(name) is not None}


def check_shard_nuclei(args: Namespace, shard: RolloutShard) -> None:
    """Check nuclei where they enter the trainer. Raises ValueError naming the sample, and when there are none."""
    ragged = shard.batch.ragged
    if args.rollout_top_p != 1.0 and IDS not in ragged:
        raise ValueError(
            f"--rollout-top-p {args.rollout_top_p}: the samples do not say which tokens they were sampled among; "
            f"--custom-convert-samples-to-train-data-path must pass {IDS} and {OFFSETS} on"
        )
    check_nuclei(ragged, sample_namer(shard.batch.numbers.get("sample_indices")), args.vocab_size)


def local_nuclei(
    token_ids: Sequence[Tensor],
    token_offsets: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> Nuclei:
    """Return the nuclei of the local response tokens, in the order of ``response_rows_and_targets``.

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
    return Nuclei(torch.cat(ids).long() if ids else every, starts)
