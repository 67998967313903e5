"""Cost of the journal of groups: bytes per token, time per group, and how long it blocks the event loop.

Groups finish on an event loop at a steady rate, as they do in a rollout, and are given to a journal or to none. A task
on the same loop sleeps 1 ms at a time and notes by how much each sleep was late. The cases take turns. The case that
encodes and writes on the loop shows what the journal's thread is for.

    python -m benchmarks.journal --runs 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.rewards import per_time, stalls
from slime.rollout.durable.journal_writer import samples_to_json
from slime.rollout.durable.recovery import GroupJournal
from slime.rollout.durable.state_codec import decode_group
from slime.rollout.groups import copy_group
from slime.utils.types import Sample

WITHOUT, WITH, ON_LOOP = "without a journal", "with the journal", "encoded and written on the loop"
ALPHABET = "abcdefghijklmnopqrstuvwxyz     "


def make_group(number: int, samples: int, prompt: int, response: int) -> list[Sample]:
    """Return a finished group: token ids below 150,000, float32 log-probs as engines report them, 4 letters a token."""
    rng = random.Random(number)
    question = "".join(rng.choices(ALPHABET, k=4 * prompt))
    ids = [rng.randrange(150_000) for _ in range(prompt)]
    group = []
    for index in range(samples):
        sample = Sample(group_index=number, index=number * samples + index, prompt=question, label="42", tokens=ids)
        sample.append_response_tokens(
            tokens=[rng.randrange(150_000) for _ in range(response)],
            log_probs=[float(np.float32(-rng.expovariate(1.0))) for _ in range(response)],
            text="".join(rng.choices(ALPHABET, k=4 * response)),
            meta_info={"finish_reason": {"type": "stop"}, "weight_version": "3", "prompt_tokens": prompt},
        )
        sample.reward = float(index % 2)
        group.append(sample)
    return group


def best_ms(work: Callable[[], object], repeats: int) -> float:
    """Return the least time of several, in ms."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def print_costs(group: list[Sample], repeats: int) -> None:
    """Print what one group costs in space and time."""
    tokens = sum(len(sample.tokens) for sample in group)
    data = b"".join(samples_to_json(group))
    text = sum(len(sample.response) + len(str(sample.prompt)) for sample in group)
    assert decode_group(json.loads(data)) == group
    print(f"{len(data) / tokens:.1f} bytes per token, {(len(data) - text) / tokens:.1f} of them not text")
    on_loop = best_ms(lambda: copy_group(group), repeats)
    encode = best_ms(lambda: samples_to_json(group), repeats)
    decode = best_ms(lambda: decode_group(json.loads(data)), repeats)
    print(
        f"ms per group: {on_loop:.3f} on the loop (a copy), {encode:.2f} in the journal's thread, {decode:.2f} to read"
    )


async def finish_groups(group: list[Sample], count: int, pause_s: float, keep: Callable[[list[Sample]], None]) -> None:
    """Let ``count`` groups finish, one every ``pause_s``."""
    for _ in range(count):
        keep(group)
        await asyncio.sleep(pause_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of every case")
    parser.add_argument("--samples", type=int, default=8, help="samples per group")
    parser.add_argument("--prompt", type=int, default=200, help="tokens per prompt")
    parser.add_argument("--response", type=int, default=2048, help="tokens per response")
    parser.add_argument("--groups-per-s", type=float, default=20.0, help="how many groups finish per second")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a run")
    given = parser.parse_args()
    group = make_group(0, given.samples, given.prompt, given.response)
    print(f"a group of {given.samples} samples, {given.prompt} + {given.response} tokens each")
    print_costs(group, 9)
    count, pause_s = round(given.groups_per_s * given.seconds), 1.0 / given.groups_per_s
    p99: dict[str, list[float]] = {}
    longest: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for run in range(given.runs):
            journal = GroupJournal(Path(folder) / str(run), {})
            journal.resume(0)
            file = open(Path(folder) / "on_loop", "wb")  # noqa: SIM115  (open for the whole run)
            cases: dict[str, Callable[[list[Sample]], object]] = {
                WITHOUT: lambda group: None,
                WITH: journal.completed,
                ON_LOOP: lambda group, file=file: file.writelines(samples_to_json(group)),  # type: ignore[misc]
            }
            for name, keep in cases.items():
                late, _ = asyncio.run(stalls(finish_groups(group, count, pause_s, keep)))  # type: ignore[arg-type]
                p99.setdefault(name, []).append(1e3 * per_time(late, 0.99))
                longest.setdefault(name, []).append(1e3 * max(late))
                journal.flush()
            file.close()
    print(f"event-loop stall in ms, {given.groups_per_s:g} groups/s for {given.seconds:g} s, {given.runs} runs each")
    print(f"{'':32}{'p99 of moments':>16}{'min':>9}{'max':>9}{'longest':>10}")
    for name, values in p99.items():
        print(
            f"{name:32}{statistics.median(values):16.3f}{min(values):9.3f}{max(values):9.3f}{max(longest[name]):10.3f}"
        )
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
