"""Metrics of the samples that got the full reward (``--log-correct-samples``): how long they are, how sure of them."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch

from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
from slime.backends.megatron_utils.data import RolloutData
from slime.backends.megatron_utils.parallel import context_parallel

_QUARTERS = ("p25", "p50", "p75", "p100")


def correct_sample_means(
    args: Namespace, data: RolloutData, all_gather: Callable[[Any], list[Any]]
) -> dict[str, float]:
    """Return means over the samples whose raw reward is 1, of all ranks; {} without the flag or such a sample.

    ``correct_response_lengths``; ``correct_length/p25`` to ``/p100``: the share of them whose response fills up to a
    quarter, half, ... of ``--rollout-max-response-len``, each quarter for itself; ``correct_entropy``: mean of minus
    the log-prob over trained tokens, an estimate of the entropy, from the trainer's log-probs or else the engine's.
    ``all_gather`` collects over DP x CP.
    """
    raw = data.get("local_raw_reward")
    if not args.log_correct_samples or raw is None:
        return {}
    correct = [i for i, reward in enumerate(raw) if isinstance(reward, Real) and reward == 1]
    local = {"correct_entropy": _surprise(data, correct)} if _log_probs(data) is not None else {}
    if context_parallel().rank == 0:
        lengths = [int(data["response_lengths"][i]) for i in correct]
        local["count"] = float(len(correct))
        local["correct_response_lengths"] = float(sum(lengths))
        local.update(_quarters(args.rollout_max_response_len, lengths))
    parts = all_gather(local)
    sums = {name: math.fsum(part.get(name, 0.0) for part in parts) for part in parts for name in part}
    count = sums.pop("count", 0.0)
    return {name: value / count for name, value in sums.items()} if count else {}


def _log_probs(data: RolloutData) -> list[torch.Tensor] | None:
    found = data.get("log_probs")
    return data.get("rollout_log_probs") if found is None else found


def _surprise(data: RolloutData, correct: list[int]) -> float:
    """Sum over samples of this rank's part of the mean of -log p over trained tokens."""
    log_probs, total = _log_probs(data), 0.0
    assert log_probs is not None
    for i in correct:
        mask = data["loss_masks"][i]
        local = slice_log_prob_with_cp(mask, data["total_lengths"][i], data["response_lengths"][i])
        total -= float((log_probs[i] * local).sum() / mask.sum().clamp_min(1))
    return total


def _quarters(longest: int | None, lengths: list[int]) -> dict[str, float]:
    if not longest:
        return {}
    counts = dict.fromkeys(_QUARTERS, 0.0)
    for length in lengths:
        counts[_QUARTERS[min(max(math.ceil(4 * length / longest) - 1, 0), 3)]] += 1
    return {f"correct_length/{name}": count for name, count in counts.items()}
