"""Sequences for the log-prob server, their division among the trainer's ranks, and what these answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.batching.schedule import build_dp_schedule

if TYPE_CHECKING:
    from slime.arguments.args import Args


@dataclass(frozen=True, eq=False)
class LogProbRequest:
    """A sequence and what is asked about it.

    tokens: int64 [n], at least two. labels: int64 [n - 1, k], ids whose log-probs are wanted in the place of
    ``tokens[1:]``; k may be 0. draws: tokens to draw there, with replacement; ``seed`` decides which.
    """

    tokens: np.ndarray
    labels: np.ndarray
    draws: int = 0
    seed: int = 0

    @classmethod
    def of(
        cls, tokens: Sequence[int], labels: Sequence[Sequence[int]] = (), draws: int = 0, seed: int = 0
    ) -> LogProbRequest:
        """Return the request for plain lists; without ``labels`` none are wanted."""
        given = np.asarray(labels, dtype=np.int64).reshape(len(tokens) - 1, -1) if labels else None
        nothing = np.empty((len(tokens) - 1, 0), dtype=np.int64)
        return cls(np.asarray(tokens, dtype=np.int64), nothing if given is None else given, draws, seed)


@dataclass(frozen=True, eq=False)
class LogProbReply:
    """Float32 arrays [n - 1, ...] about ``tokens[1:]`` of a request.

    log_probs [n - 1]: of these tokens. label_log_probs [n - 1, k]: of the labels. sampled_ids (int64) and
    sampled_log_probs [n - 1, draws]: of drawn tokens.
    """

    log_probs: np.ndarray
    label_log_probs: np.ndarray
    sampled_ids: np.ndarray
    sampled_log_probs: np.ndarray


@dataclass(frozen=True, eq=False)
class LogProbShard:
    """The requests of one data-parallel rank, and its micro-batches as lists of positions among them."""

    requests: list[LogProbRequest]
    micro_batch_indices: list[list[int]]


def shards_of_requests(
    args: Args, train_parallel_config: Mapping[str, Any], requests: Sequence[LogProbRequest]
) -> tuple[list[LogProbShard], list[list[int]]]:
    """Divide ``requests`` as a step of training; return a shard per data-parallel rank and the positions in each.

    So that all ranks have as many micro-batches, the shortest request is computed more than once where there are too
    few: copies have positions past the last.
    """
    config, count = train_parallel_config, len(requests)
    group = config["microbatch_group_size_per_vp_stage"] if config["vpp_size"] > 1 else 1
    multiple = config["dp_size"] * group * (1 if args.use_dynamic_batch_size else args.micro_batch_size)
    shortest = min(requests, key=lambda request: len(request.tokens))
    padding = LogProbRequest.of(shortest.tokens[:2].tolist())
    padded = [*requests, *[padding] * (-count % multiple)]
    lengths = [len(request.tokens) for request in padded]
    schedule = build_dp_schedule(
        args, config, lengths, global_batch_size=len(padded), rollout_indices=range(len(padded))
    )
    shards = [
        LogProbShard([padded[i] for i in partition], schedule.micro_batch_indices[rank])
        for rank, partition in enumerate(schedule.partitions)
    ]
    return shards, schedule.partitions
