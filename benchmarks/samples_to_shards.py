"""Time and bytes to turn samples into per-rank training tensors: columns against lists and tensors.

Each way begins with the samples of a finished rollout (lists, as generation leaves them), makes training data, puts one
object per rank into Ray's object store, and ends with per-sample tensors in the process that gets it. Bytes are those
of the objects in the store. Ways take turns, so a change of load hits all alike.

    python -m benchmarks.samples_to_shards --samples 512 --response 2000 --ranks 8 --repeats 5
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from slime.batching.columns import RolloutColumns
from slime.batching.schedule import DpSchedule
from slime.batching.train_data import build_train_data
from slime.utils.types import Sample

DTYPES = {"tokens": torch.int64, "loss_masks": torch.int32, "rollout_log_probs": torch.float32}
ARGS = argparse.Namespace(
    rollout_top_p=1.0, reward_key=None, use_rollout_routing_replay=False, advantage_estimator="grpo", kl_coef=0.0
)


def make_samples(count: int, prompt: int, response: int) -> list[Sample]:
    """Samples with response lengths uniform in [response / 2, 3 response / 2], a tenth of the tokens masked."""
    rng = random.Random(0)
    samples = []
    for index in range(count):
        length = rng.randint(response // 2, response * 3 // 2)
        sample = Sample(
            index=index,
            group_index=index // 8,
            tokens=[rng.randrange(150_000) for _ in range(prompt + length)],
            response_length=length,
            loss_mask=[int(rng.random() > 0.1) for _ in range(length)],
            rollout_log_probs=[-rng.random() for _ in range(length)],
            reward=rng.random(),
            status=Sample.Status.COMPLETED,
        )
        samples.append(sample)
    return samples


class RayStore:
    """Ray's object store, with all that its serialization does."""

    name = "Ray's object store"

    def __init__(self) -> None:
        import ray

        self.ray = ray
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="warning")

    def through(self, message: Any) -> tuple[Any, int]:
        """Return what a receiver gets of ``message``, and the bytes that it takes in the store."""
        ref = self.ray.put(message)
        received = self.ray.get(ref)
        location = self.ray.experimental.get_object_locations([ref])[ref]
        return received, int(location["object_size"])


class PickleStore:
    """A pickle with out-of-band buffers, which is what Ray makes, without Ray."""

    name = "a pickle with out-of-band buffers"

    def through(self, message: Any) -> tuple[Any, int]:
        """Return what a receiver gets of ``message``, and the bytes of pickle and buffers."""
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        copies = [bytes(buffer.raw()) for buffer in buffers]
        return pickle.loads(head, buffers=copies), len(head) + sum(map(len, copies))


@dataclass
class Outcome:
    """The tensors that the ranks have in the end, and the bytes of the objects that they got it from."""

    ranks: list[dict[str, Any]] = field(default_factory=list)
    stored: int = 0


def by_columns(data: dict[str, Any], schedule: DpSchedule, store: Any) -> Outcome:
    outcome = Outcome()
    for shard in RolloutColumns.from_train_data(data).shards(schedule):
        received, size = store.through(shard)
        outcome.ranks.append(received.to_rollout_data())
        outcome.stored += size
    return outcome


def by_lists(data: dict[str, Any], schedule: DpSchedule, store: Any) -> Outcome:
    """Send each rank its Python lists; the rank makes a tensor per sample and field."""
    outcome = Outcome()
    for partition in schedule.partitions:
        received, size = store.through(_select(data, partition))
        outcome.ranks.append(_with_tensors(received))
        outcome.stored += size
    return outcome


def by_tensor_per_sample(data: dict[str, Any], schedule: DpSchedule, store: Any) -> Outcome:
    """Make a tensor per sample and field before sending."""
    outcome = Outcome()
    for partition in schedule.partitions:
        received, size = store.through(_with_tensors(_select(data, partition)))
        outcome.ranks.append(received)
        outcome.stored += size
    return outcome


def _select(data: dict[str, Any], partition: list[int]) -> dict[str, Any]:
    return {key: [values[i] for i in partition] for key, values in data.items()}


def _with_tensors(part: dict[str, Any]) -> dict[str, Any]:
    return {
        key: [torch.tensor(row, dtype=DTYPES[key]) for row in rows] if key in DTYPES else rows
        for key, rows in part.items()
    }


def check_equal(outcomes: list[Outcome]) -> None:
    """Stop when the ways do not arrive at the same tensors."""
    for rank, first in enumerate(outcomes[0].ranks):
        for other in outcomes[1:]:
            for key in DTYPES:
                pairs = zip(first[key], other.ranks[rank][key], strict=True)
                assert all(torch.equal(a, b) for a, b in pairs), (rank, key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=200, help="tokens per prompt")
    parser.add_argument("--response", type=int, default=2000, help="mean response tokens")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--without-ray", action="store_true", help="pickle as Ray does, in this process")
    options = parser.parse_args()
    torch.set_num_threads(1)

    samples = make_samples(options.samples, options.prompt, options.response)
    rewards = [float(sample.reward) for sample in samples]  # type: ignore[arg-type]
    tokens = sum(len(sample.tokens) for sample in samples)
    response = sum(sample.response_length for sample in samples)
    partitions = [list(range(rank, options.samples, options.ranks)) for rank in range(options.ranks)]
    schedule = DpSchedule(partitions, [[p] for p in partitions], [1], [options.samples])
    store: Any = PickleStore() if options.without_ray else RayStore()
    ways: dict[str, Callable[[dict[str, Any], DpSchedule, Any], Outcome]] = {
        "columns": by_columns,
        "lists": by_lists,
        "tensor per sample": by_tensor_per_sample,
    }

    def once(way: Callable[[dict[str, Any], DpSchedule, Any], Outcome]) -> Outcome:
        return way(build_train_data(ARGS, samples, rewards, rewards), schedule, store)

    outcomes = {name: once(way) for name, way in ways.items()}
    check_equal(list(outcomes.values()))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            once(way)
            seconds[name].append(time.perf_counter() - start)

    print(f"{options.samples} samples of {tokens:,} tokens ({response:,} of responses), {options.ranks} ranks,")
    print(f"through {store.name}, {options.repeats} repeats; 1 thread")
    least = 4 * tokens + 5 * response
    print(f"4 bytes per token and 5 per response token are {least:,} bytes ({least / tokens:.2f} per token)")
    for name, times in seconds.items():
        rates = [tokens / t / 1e6 for t in times]
        ratios = [t / c for t, c in zip(times, seconds["columns"], strict=True)]
        beyond = outcomes[name].stored - least
        print(
            f"{name:18} {statistics.median(rates):6.2f} M tokens/s ({min(rates):.2f} to {max(rates):.2f}), "
            f"time / columns {statistics.median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f}), "
            f"{outcomes[name].stored:,} bytes: {outcomes[name].stored / tokens:.2f} per token; beyond those "
            f"{beyond / options.samples:.0f} per sample"
        )
    print(f"load average {os.getloadavg()}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
