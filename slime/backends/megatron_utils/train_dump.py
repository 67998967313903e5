"""The train-data dump of ``--save-debug-train-data``: what the loss saw, one entry per sample, in rollout order."""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.cp_utils import all_gather_with_cp
from slime.backends.megatron_utils.data import RolloutData, num_samples, per_sample_columns, sample_index
from slime.backends.megatron_utils.parallel import (
    all_gather_objects,
    context_parallel,
    data_parallel,
    is_last_stage,
    is_main_rank,
    tensor_parallel,
)
from slime.utils.atomic_file import replacing

logger = logging.getLogger(__name__)

# Columns with one value per response token, kept in the CP-local layout during training.
_CP_LOCAL = (
    "log_probs", "ref_log_probs", "teacher_log_probs", "rollout_log_probs", "entropy", "ref_entropy", "teacher_entropy",
    "values", "kl", "advantages", "returns", "opd_reverse_kl",
)  # fmt: skip
_SHARD_KEYS = ("sample_indices", "partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes")


def save_train_dump(args: Namespace, rollout_id: int, data: RolloutData) -> None:
    """Write format version 2 to the path template ``args.save_debug_train_data`` (fields rollout_id, rank).

    Collective over DP x CP on the last pipeline stage; the file is written by its first rank.
    """
    template = args.save_debug_train_data
    if not template or not is_last_stage():
        return
    columns = {name: _full_length(data, name, column) for name, column in per_sample_columns(data).items()}
    if tensor_parallel().rank != 0 or context_parallel().rank != 0:
        return
    dp = data_parallel()
    part = _local_part(data, columns, dp.rank)
    parts = all_gather_objects(part, dp)
    if not is_main_rank():
        return
    samples = [sample for samples, _ in parts for sample in samples]
    path = Path(template.format(rollout_id=rollout_id, rank=dist.get_rank()))
    dump = {
        "format_version": 2,
        "rollout_id": rollout_id,
        "rank": dist.get_rank(),
        "samples": _in_rollout_order(samples),
        "dp_shards": [shard for _, shard in parts],
        "raw_reward": _to_host(data.get("raw_reward")),
    }
    with replacing(path) as temporary:
        torch.save(dump, temporary)
    logger.info("saved train data of rollout %d to %s (%d samples)", rollout_id, path, len(samples))


def _full_length(data: RolloutData, name: str, column: Any) -> list[Any]:
    if name in _CP_LOCAL:
        lengths = zip(column, data["total_lengths"], data["response_lengths"], strict=True)
        column = [all_gather_with_cp(values, total, response) for values, total, response in lengths]
    return [_to_host(value) for value in column]


def _local_part(data: RolloutData, columns: dict[str, list[Any]], dp_rank: int) -> tuple[list[dict], dict[str, Any]]:
    partition = data.get("partition")
    samples = []
    for i in range(num_samples(data)):
        sample: dict[str, Any] = {
            "data_parallel_rank": dp_rank,
            "sample_index": sample_index(data, i),
            "rollout_position": None if partition is None else int(partition[i]),
        }
        sample.update({name: column[i] for name, column in columns.items() if name != "sample_indices"})
        samples.append(sample)
    shard = {"rank": dist.get_rank(), "data_parallel_rank": dp_rank}
    shard.update({name: _to_host(data.get(name)) for name in _SHARD_KEYS})
    rest = {k: _to_host(v) for k, v in data.items() if k not in columns and k not in shard and k != "raw_reward"}
    return samples, {**shard, **rest}


def _in_rollout_order(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for key in ("rollout_position", "sample_index"):
        if all(sample[key] is not None for sample in samples):
            return sorted(samples, key=lambda sample: sample[key])
    logger.warning("train dump: samples have neither positions nor indices; they are in the order of the ranks")
    return samples


def _to_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_host(item) for name, item in value.items()}
    return value.detach().cpu().clone() if torch.is_tensor(value) else value
