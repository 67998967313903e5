"""Delay of an event loop while rewards are graded: in the workers, beside the loop, on the loop.

A task sleeps 1 ms at a time and notes by how much each sleep was late, while 64 rewards of 200 ms CPU time each are
computed: by the workers of ``slime.rollout.rm_hub`` for this loop; by as many unrelated processes, of which the loop
knows nothing (what the machine itself costs); and on the loop. The cases take turns.

    python -m benchmarks.rewards --runs 5
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from slime.rollout.rm_hub.workers import RewardWorkers, WorkerLimits, default_worker_count

TICK_S = 0.001
BURN = "benchmarks.rewards.burn"
BESIDE, WORKERS, ON_LOOP = "idle loop, unrelated processes", "graded in the workers", "graded on the loop"


def burn(cpu_s: float) -> float:
    """A reward that takes this much CPU time."""
    end = time.process_time() + cpu_s
    while time.process_time() < end:
        math.factorial(300)
    return 1.0


@dataclass
class Setting:
    """The reward that is graded, and the number of processes that grade."""

    rewards: int
    cpu_s: float
    processes: int
    pool: RewardWorkers

    def share(self, number: int) -> int:
        """Return how many rewards process ``number`` computes."""
        return self.rewards // self.processes + (number < self.rewards % self.processes)


async def beside(setting: Setting) -> None:
    """Wait for processes that compute the same rewards and discard them."""
    code = "import sys; sys.path[:0] = sys.argv[3:]; from benchmarks.rewards import burn\n"
    code += "for _ in range(int(sys.argv[1])): burn(float(sys.argv[2]))"
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(setting.share(n)), str(setting.cpu_s), *sys.path])
        for n in range(setting.processes)
    ]
    while any(process.poll() is None for process in running):
        await asyncio.sleep(0.05)
    if any(process.returncode for process in running):
        raise RuntimeError("a process beside the loop failed")


async def in_workers(setting: Setting) -> None:
    """Grade in the worker processes."""
    await asyncio.gather(*(setting.pool.call(BURN, setting.cpu_s) for _ in range(setting.rewards)))


async def on_loop(setting: Setting) -> None:
    """Grade where the loop runs, which goes round between any two rewards."""
    for _ in range(setting.rewards):
        burn(setting.cpu_s)
        await asyncio.sleep(0)


CASES: dict[str, Callable[[Setting], Awaitable[None]]] = {BESIDE: beside, WORKERS: in_workers, ON_LOOP: on_loop}


async def stalls(work: Awaitable[None]) -> tuple[list[float], float]:
    """Return by how many seconds each tick was late while ``work`` was done, and how long that took."""
    late: list[float] = []
    began = time.perf_counter()
    task = asyncio.ensure_future(work)
    while not task.done():
        before = time.perf_counter()
        await asyncio.sleep(TICK_S)
        late.append(time.perf_counter() - before - TICK_S)
    await task
    return late, time.perf_counter() - began


def per_time(late: list[float], share: float) -> float:
    """Return the lateness that ``share`` of all moments (not of all ticks: late ones are few) stay below."""
    ordered = sorted(late)
    total = sum(max(s, 0.0) + TICK_S for s in ordered)
    passed = 0.0
    for seconds in ordered:
        passed += max(seconds, 0.0) + TICK_S
        if passed >= share * total:
            return seconds
    return ordered[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of every case")
    parser.add_argument("--rewards", type=int, default=64)
    parser.add_argument("--cpu-ms", type=float, default=200.0, help="CPU time of a reward")
    parser.add_argument("--processes", type=int, default=default_worker_count(), help="workers")
    given = parser.parse_args()
    pool = RewardWorkers(given.processes, WorkerLimits(cpu_s=60.0))
    setting = Setting(given.rewards, given.cpu_ms / 1000.0, given.processes, pool)
    pool.submit(BURN, 0.0).result()
    p99: dict[str, list[float]] = {name: [] for name in CASES}
    ticks: dict[str, list[float]] = {name: [] for name in CASES}
    took: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(given.runs):
        for name, case in CASES.items():
            late, seconds = asyncio.run(stalls(case(setting)))
            p99[name].append(per_time(late, 0.99))
            ticks[name].append(sorted(late)[math.ceil(0.99 * len(late)) - 1])
            took[name].append(seconds)
    pool.close()
    print(f"{given.rewards} rewards of {given.cpu_ms:g} ms CPU, {given.processes} processes, {given.runs} runs each")
    print(f"stall p99 in ms{'':17}{'of moments':>12}{'min':>9}{'max':>9}{'of ticks':>11}{'all in s':>10}")
    for name, values in p99.items():
        spread = "".join(f"{1e3 * ms:9.3f}" for ms in (min(values), max(values)))
        of_ticks, seconds = statistics.median(ticks[name]), statistics.median(took[name])
        print(f"{name:32}{1e3 * statistics.median(values):12.3f}{spread}{1e3 * of_ticks:11.3f}{seconds:10.1f}")
    for above, below in ((WORKERS, BESIDE), (ON_LOOP, WORKERS)):
        of_runs = [a / b for a, b in zip(p99[above], p99[below], strict=True)]
        print(f"{above} / {below}: {statistics.median(of_runs):.2f} ({min(of_runs):.2f} to {max(of_runs):.2f})")
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
