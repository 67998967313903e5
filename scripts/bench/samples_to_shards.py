"""How fast samples become per-rank training tensors: columns against Python lists and against a tensor per sample.

Each way goes from the same train data (plain lists, as the rollout leaves them) over a pickle with out-of-band buffers
(what Ray does) to per-sample tensors in the receiving process. Ways take turns, so a change of load hits all alike.

    python scripts/bench/samples_to_shards.py --samples 512 --response 2000 --ranks 8 --repeats 5
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from slime.batching.columns import RolloutBatch
from slime.batching.schedule import DpSchedule

DTYPES = {"tokens": torch.int64, "loss_masks": torch.int32, "rollout_log_probs": torch.float32}


def make_data(samples: int, prompt: int, response: int) -> dict[str, Any]:
    """Train data of samples with response lengths uniform in [response / 2, 3 response / 2]."""
    rng = random.Random(0)
    lengths = [rng.randint(response // 2, response * 3 // 2) for _ in range(samples)]
    return {
        "tokens": [[rng.randrange(150_000) for _ in range(prompt + length)] for length in lengths],
        "response_lengths": lengths,
        "rewards": [rng.random() for _ in lengths],
        "raw_reward": [rng.random() for _ in lengths],
        "truncated": [0] * samples,
        "sample_indices": list(range(samples)),
        "loss_masks": [[1] * length for length in lengths],
        "rollout_ids": list(range(samples)),
        "rollout_mask_sums": [float(length) for length in lengths],
        "rollout_log_probs": [[-rng.random() for _ in range(length)] for length in lengths],
    }


def send_and_receive(message: Any) -> Any:
    """Pickle with protocol 5, buffers out of band, and unpickle from read-only copies of them."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(head, buffers=[bytes(buffer.raw()) for buffer in buffers])


def by_columns(data: dict[str, Any], schedule: DpSchedule) -> list[dict[str, Any]]:
    shards = RolloutBatch.from_train_data(data).shards(schedule)
    return [send_and_receive(shard).to_rollout_data() for shard in shards]


def by_lists(data: dict[str, Any], schedule: DpSchedule) -> list[dict[str, Any]]:
    """Send each rank its Python lists; the rank makes tensors."""
    received = [send_and_receive(_select(data, partition)) for partition in schedule.partitions]
    return [_with_tensors(part) for part in received]


def by_tensor_per_sample(data: dict[str, Any], schedule: DpSchedule) -> list[dict[str, Any]]:
    """Make a tensor per sample and field before sending."""
    return [send_and_receive(_with_tensors(_select(data, partition))) for partition in schedule.partitions]


def _select(data: dict[str, Any], partition: list[int]) -> dict[str, Any]:
    return {key: [values[i] for i in partition] for key, values in data.items()}


def _with_tensors(part: dict[str, Any]) -> dict[str, Any]:
    return {
        key: [torch.tensor(row, dtype=DTYPES[key]) for row in rows] if key in DTYPES else rows
        for key, rows in part.items()
    }


def check_equal(results: list[list[dict[str, Any]]]) -> None:
    """Stop when the ways do not arrive at the same tensors."""
    for rank, first in enumerate(results[0]):
        for other in results[1:]:
            for key in DTYPES:
                assert all(torch.equal(a, b) for a, b in zip(first[key], other[rank][key], strict=True)), (rank, key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=200, help="tokens per prompt")
    parser.add_argument("--response", type=int, default=2000, help="mean response tokens")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)

    data = make_data(options.samples, options.prompt, options.response)
    tokens = sum(map(len, data["tokens"]))
    partitions = [list(range(rank, options.samples, options.ranks)) for rank in range(options.ranks)]
    schedule = DpSchedule(partitions, [[p] for p in partitions], [1], [options.samples])
    ways: dict[str, Callable[[dict[str, Any], DpSchedule], list[dict[str, Any]]]] = {
        "columns": by_columns,
        "lists": by_lists,
        "tensor per sample": by_tensor_per_sample,
    }
    check_equal([way(data, schedule) for way in ways.values()])

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            way(data, schedule)
            seconds[name].append(time.perf_counter() - start)
    print(f"{options.samples} samples, {tokens:,} tokens, {options.ranks} ranks, {options.repeats} repeats; 1 thread")
    for name, times in seconds.items():
        rates = [tokens / t / 1e6 for t in times]
        ratios = [t / c for t, c in zip(times, seconds["columns"], strict=True)]
        print(
            f"{name:18} {statistics.median(rates):7.2f} M tokens/s ({min(rates):.2f} to {max(rates):.2f}), "
            f"time / columns {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    print(f"load average {os.getloadavg()}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
