"""Time and balance of the data-parallel schedule, against the simple ways of dividing samples over ranks.

Balance is what ranks wait for: the sum over steps of the heaviest rank's forward FLOPs over that of the mean (1 is
perfect). ``fill`` is how full micro-batches are, in tokens of what fits: few full ones are faster than many small.
Lengths are log-normal, as answers are. Ways take turns on the same lengths; every repeat has lengths of its own.

    python -m benchmarks.dp_schedule --samples 100 1000 10000 100000 --repeats 5
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from slime.batching.schedule import DpSchedule, build_dp_schedule
from slime.models.flops import FlopsModel, flops_model

MODEL = {
    "num_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8, "kv_channels": 128,
    "ffn_hidden_size": 12288, "vocab_size": 151936, "swiglu": True, "group_query_attention": True,
    "enable_mtp_training": False,
}  # fmt: skip
MAX_TOKENS, LONGEST = 16384, 16384
Way = Callable[[list[int], int, int], DpSchedule]


def make_lengths(count: int, seed: int) -> list[int]:
    """Return lengths with a median of 1,500 tokens and a long tail."""
    rng = random.Random(seed)
    return [min(LONGEST, max(64, int(rng.lognormvariate(7.3, 0.9)))) for _ in range(count)]


def scheduled(**flags: bool) -> Way:
    """The schedule of slime with flags."""

    def way(lengths: list[int], ranks: int, batch: int) -> DpSchedule:
        args = SimpleNamespace(
            **MODEL, use_dynamic_batch_size=True, max_tokens_per_gpu=MAX_TOKENS,
            balance_data=flags.get("balance_data", False), balance_by_flops=flags.get("balance_by_flops", False),
        )  # fmt: skip
        config = {"dp_size": ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        return build_dp_schedule(
            args, config, lengths, global_batch_size=batch, rollout_indices=list(range(len(lengths)))
        )

    return way


def dealt(assign: Callable[[int, int, int], int]) -> Way:
    """``assign(position in step, ranks, size of step)`` says whose a sample is; one sample per micro-batch."""

    def way(lengths: list[int], ranks: int, batch: int) -> DpSchedule:
        partitions: list[list[int]] = [[] for _ in range(ranks)]
        steps = len(lengths) // batch
        for step in range(steps):
            for i in range(batch):
                partitions[assign(i, ranks, batch)].append(step * batch + i)
        micro_batches = [[[i] for i in range(len(partition))] for partition in partitions]
        return DpSchedule(partitions, micro_batches, [batch // ranks] * steps, [batch] * steps)

    return way


WAYS: dict[str, Way] = {
    "first fit": scheduled(),
    "first fit, --balance-data": scheduled(balance_data=True),
    "--balance-by-flops": scheduled(balance_by_flops=True),
    "round robin, one by one": dealt(lambda i, ranks, _: i % ranks),
    "in blocks, one by one": dealt(lambda i, ranks, batch: i // (batch // ranks)),
}


def imbalance(schedule: DpSchedule, lengths: list[int], model: FlopsModel) -> float:
    """Sum over steps of the heaviest rank's FLOPs over the sum of the means."""
    flops = model.forward(lengths)
    heaviest = total = 0.0
    start = 0
    for count in schedule.num_microbatches:
        loads = [
            sum(flops[partition[i]] for indices in micro_batches[start : start + count] for i in indices)
            for partition, micro_batches in zip(schedule.partitions, schedule.micro_batch_indices, strict=True)
        ]
        heaviest += max(loads)
        total += sum(loads) / len(loads)
        start += count
    return heaviest / total


def fill(schedule: DpSchedule, lengths: list[int]) -> float:
    """Tokens per micro-batch over what fits."""
    trained = sum(lengths[p] for partition in schedule.partitions for p in partition)
    return trained / (sum(len(m) for m in schedule.micro_batch_indices) * MAX_TOKENS)


def measure(count: int, ranks: int, batch: int, repeats: int) -> None:
    batch = min(batch, count) // ranks * ranks
    model = flops_model(SimpleNamespace(**MODEL))
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "balance": [], "fill": []} for name in WAYS}
    for repeat in range(repeats):
        lengths = make_lengths(count, repeat)
        for name, way in WAYS.items():
            start = time.process_time()
            schedule = way(lengths, ranks, batch)
            found[name]["seconds"].append(time.process_time() - start)
            found[name]["balance"].append(imbalance(schedule, lengths, model))
            found[name]["fill"].append(fill(schedule, lengths))
    print(f"{count:,} samples, {ranks} ranks, steps of {batch}, {repeats} repeats")
    for name, values in found.items():
        print(f"  {name:26} {_said(values['seconds'], ' s')}, max / mean {_said(values['balance'])}, fill "
              f"{_said(values['fill'])}", flush=True)  # fmt: skip


def _said(values: list[float], unit: str = "") -> str:
    return f"{statistics.median(values):.4f}{unit} ({min(values):.4f} to {max(values):.4f})"


def main() -> None:
    parser: Any = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--global-batch-size", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for count in options.samples:
        measure(count, options.ranks, options.global_batch_size, options.repeats)
    print(f"load average {os.getloadavg()}, {os.cpu_count()} cores; seconds are CPU seconds")


if __name__ == "__main__":
    main()
