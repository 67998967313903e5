"""Cost of one rollout manager as engines grow in number: CPU per token and request, stalls, memory, time to train.

A process plays any number of engines (``tests.support.standin.many``). Each run is a process of its own that holds the
real rollout manager: prompts, request slots, HTTP client, samples, journal, conversion to shards, and a store for them.
It collects one rollout with ``--per-engine`` requests in flight for each engine. Engines answer as late as it takes for
``--rate`` requests/s, so that all runs are offered the same load and only the number of engines differs. Costs are the
manager's CPU time, not the wall-clock time of a machine that others may use. With ``--baseline`` another checkout runs
too, taking turns. Not measured: Ray's transfer of shards to other nodes, the work of engines and of the router.

    python -m benchmarks.scaling --engines 8 64 512 2048 --repeats 3 --svg docs/assets/scaling.svg
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import gc
import json
import math
import os
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

from tests.support.standin.process import standin_process, stats

TICK_S = 0.005
COLUMNS = {
    "us_per_token": ("us CPU/token", "{:.2f}"),
    "us_per_request": ("us CPU/request", "{:.0f}"),
    "stall_p99_ms": ("stall p99 ms", "{:.0f}"),
    "stall_max_ms": ("max ms", "{:.0f}"),
    "garbage_max_ms": ("collector max ms", "{:.0f}"),
    "memory_mb": ("memory MB", "{:.0f}"),
    "bytes_per_token": ("bytes/token", "{:.0f}"),
    "ready_s": ("ready s", "{:.2f}"),
    "journal_us_per_token": ("journal us/token", "{:.2f}"),
    "looks": ("looks", "{:.0f}"),
    "most_in_flight": ("in flight", "{:.0f}"),
    "seconds": ("seconds", "{:.1f}"),
}
"""Result -> heading and format. ``ready`` is from the last reply to the shards in the store."""


class CharacterTokenizer:
    """One token per character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))

    def __call__(self, text: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(t) for t in text]}


class Heartbeat:
    """By how much each tick of a task on the rollouts' event loop was late (s), and when (time.monotonic).

    Only as far as this process was running meanwhile: that others have the cores on a shared machine does not count.
    """

    def __init__(self) -> None:
        from slime.utils.async_utils import get_async_loop

        self.ticks: list[tuple[float, float]] = []
        self._task = asyncio.run_coroutine_threadsafe(self._beat(), get_async_loop())

    async def _beat(self) -> None:
        while True:
            before, cpu_before = time.monotonic(), time.process_time()
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.ticks.append((now, max(0.0, min(now - before - TICK_S, time.process_time() - cpu_before))))

    def stop(self) -> None:
        self._task.cancel()

    def late(self, begin: float, end: float) -> tuple[float, float]:
        """Return the 99th percentile over moments, and the most, between two moments."""
        late = sorted(seconds for when, seconds in self.ticks if begin <= when <= end) or [0.0]
        total = sum(late) + TICK_S * len(late)
        passed = 0.0
        for seconds in late:
            passed += seconds + TICK_S
            if passed >= 0.99 * total:
                return seconds, late[-1]
        return late[-1], late[-1]


class JournalClock:
    """CPU seconds of the threads that write the journal."""

    def __init__(self) -> None:
        from slime.rollout.durable.journal_writer import JournalWriter

        self.seconds, self.left_out = 0.0, 0
        self._run = JournalWriter._run
        clock = self

        def run(writer: Any) -> None:
            clock._run(writer)
            clock.seconds += time.thread_time()
            clock.left_out = writer._left_out

        self.patch = mock.patch.object(JournalWriter, "_run", run)


class GarbageClock:
    """Seconds that the garbage collector takes, in all and at most at a time; nothing else runs meanwhile."""

    def __init__(self) -> None:
        self.seconds = self.longest = self._began = 0.0
        gc.callbacks.append(self._count)

    def _count(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
            return
        took = time.thread_time() - self._began
        self.seconds, self.longest = self.seconds + took, max(self.longest, took)


class Store:
    """Keeps what Ray's object store would: a pickle with the columns' buffers copied out of band; or Ray's own."""

    def __init__(self, *, use_ray: bool) -> None:
        self.bytes = 0
        self._ray: Any = None
        self._kept: list[Any] = []
        if use_ray:
            import ray

            ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="warning")
            self._ray = ray

    def put(self, shard: Any) -> Any:
        if self._ray is not None:
            self._kept.append(self._ray.put(shard))
            return self._kept[-1]
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(shard, protocol=5, buffer_callback=buffers.append)
        copies = [bytes(buffer.raw()) for buffer in buffers]
        self._kept.append((head, copies))
        self.bytes += len(head) + sum(map(len, copies))
        return len(self._kept) - 1


def manager_args(url: str, words: argparse.Namespace, folder: Path) -> Any:
    """The arguments of the run: prompts, checkpoints and journal in ``folder``, engines behind ``url``."""
    from tests.support.arguments import run_args

    address = urlsplit(url)
    prompts = folder / "prompts.jsonl"
    count = min(words.groups, 10_000)
    with open(prompts, "w") as file:
        for number in range(count):
            question = f"{number:08d} ".ljust(words.prompt, "q")
            file.write(json.dumps({"input": question, "label": "42"}) + "\n")
    save = str(folder / "save") if words.journal else None
    return run_args(
        continues_own_checkpoints=words.journal,
        debug_train_only=True,  # no fleet of engines: they are there already
        global_batch_size=words.groups * words.samples,
        hf_checkpoint="",
        label_key="label",
        load=save,
        n_samples_per_prompt=words.samples,
        num_rollout=10,
        over_sampling_batch_size=words.groups,
        prompt_data=str(prompts),
        rm_type="random",
        rollout_batch_size=words.groups,
        rollout_max_response_len=1 << 20,
        rollout_num_engines=words.engines,
        rollout_request_timeout=3600.0,
        rollout_seed=0,
        run_dir=str(folder / "run"),
        save=save,
        save_interval=1 if words.journal else None,
        sglang_router_ip=address.hostname,
        sglang_router_port=address.port,
        sglang_server_concurrency=words.per_engine,
        use_dynamic_batch_size=False,
    )


@contextlib.contextmanager
def without_cluster(store: Store) -> Iterator[None]:
    """A rollout manager outside of Ray, with no checkpoint to read a tokenizer from."""
    from slime.ray.manager import rollout_manager
    from slime.rollout import data_source, sglang_rollout

    tokenizer = mock.Mock(return_value=CharacterTokenizer())
    with (
        mock.patch.object(rollout_manager, "ray", SimpleNamespace(put=store.put)),
        mock.patch.object(rollout_manager.worker, "begin", mock.Mock()),
        mock.patch.object(data_source, "load_tokenizer", tokenizer),
        mock.patch.object(sglang_rollout, "load_tokenizer", tokenizer),
    ):
        yield


def warm_up(manager: Any, args: Any) -> None:
    """Make a rollout of a few groups, for what is imported, opened and cached by the first one."""
    sizes = ("rollout_batch_size", "over_sampling_batch_size", "global_batch_size")
    real = {name: getattr(args, name) for name in sizes}
    vars(args).update(zip(sizes, (2, 2, 2 * args.n_samples_per_prompt), strict=True))
    manager.generate(0)
    vars(args).update(real)


def run_manager(url: str, words: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Make one rollout in this process and return what it cost."""
    from slime.ray.manager.rollout_manager import RolloutManager
    from slime.servers import http_utils

    args = manager_args(url, words, folder)
    http_utils.init_http_client(args)
    store, journal = Store(use_ray=words.ray), JournalClock()
    with without_cluster(store), journal.patch:
        manager = RolloutManager(args)
        manager.setup((None, [], []), {})
        layout = {"dp_size": words.ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        manager.set_train_parallel_config(layout)
        manager.data_source.load(-1)
        warm_up(manager, args)
        generated: list[tuple[float, float]] = []
        make_samples = manager._samples

        def timed(rollout_id: int) -> Any:
            made = make_samples(rollout_id)
            generated.append((time.monotonic(), time.process_time()))
            return made

        manager._samples = timed  # type: ignore[method-assign]
        gc.collect()
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        heartbeat, garbage = Heartbeat(), GarbageClock()
        began, cpu_began = time.monotonic(), time.process_time()
        manager.generate(1)
        ended, cpu_ended = time.monotonic(), time.process_time()
        heartbeat.stop()
        if words.journal:
            manager.data_source._recovery.journal.flush()
    cpu_flushed = time.process_time()
    counts = stats(url)
    tokens = words.groups * words.samples * words.tokens
    requests = words.groups * words.samples
    made, cpu_made = generated[-1]
    p99, most = heartbeat.late(began, made)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - held
    cpu = cpu_flushed - cpu_began
    journal_bytes = sum(file.stat().st_size for file in folder.glob("save/rollout/journal_*"))
    return {
        "engines": words.engines,
        "groups": words.groups,
        "us_per_token": 1e6 * cpu / tokens,
        "us_per_request": 1e6 * cpu / requests,
        "generation_us_per_request": 1e6 * (cpu_made - cpu_began) / requests,
        "conversion_us_per_request": 1e6 * (cpu_ended - cpu_made) / requests,
        "garbage_us_per_token": 1e6 * garbage.seconds / tokens,
        "garbage_max_ms": 1e3 * garbage.longest,
        "stall_p99_ms": 1e3 * p99,
        "stall_max_ms": 1e3 * most,
        "memory_mb": memory,
        "bytes_per_token": memory * 2**20 / tokens,
        "ready_s": ended - counts["last_reply"],
        "journal_us_per_token": 1e6 * journal.seconds / tokens,
        "journal_bytes_per_token": journal_bytes / tokens,
        "journal_left_out": journal.left_out,
        "stored_bytes_per_token": store.bytes / tokens,
        "looks": counts["looks"],
        "most_in_flight": counts["most_in_flight"],
        "seconds": made - began,
        "load": os.getloadavg()[0],
        "threads": threading.active_count(),
    }


def run_one(words: argparse.Namespace) -> dict[str, float]:
    """Make one rollout, with the engines in a process beside this one."""
    mean_s = words.engines * words.per_engine / words.rate
    command = ["--engines", words.engines, "--tokens", words.tokens, "--mean-seconds", mean_s]
    with (
        tempfile.TemporaryDirectory() as folder,
        standin_process(*command, module="tests.support.standin.many") as url,
    ):
        if not words.profile:
            return run_manager(url, words, Path(folder))
        profiler = cProfile.Profile(time.thread_time)
        from slime.utils.async_utils import run

        async def enable() -> None:
            profiler.enable()

        run(enable())  # on the thread of the event loop
        result = run_manager(url, words, Path(folder))

        async def disable() -> None:
            profiler.disable()

        run(disable())
        profiler.dump_stats(words.profile)
        return result


def spawn(words: argparse.Namespace, engines: int, groups: int, checkout: str | None) -> dict[str, float]:
    """Return the result of a run in a process of its own, in this checkout or in another one."""
    options = ["--one", "--engines", engines, "--groups", groups]
    for name in ("per_engine", "samples", "tokens", "prompt", "rate", "ranks"):
        options += [f"--{name.replace('_', '-')}", getattr(words, name)]
    options += ["--ray"] if words.ray else []
    options += [] if words.journal else ["--no-journal"]
    command = [sys.executable, "-m", "benchmarks.scaling", *map(str, options)]
    environment = {**os.environ, "PYTHONPATH": checkout} if checkout else None
    done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def groups_for(words: argparse.Namespace, engines: int) -> int:
    """Return how many groups a rollout has: enough to fill the engines ``--rounds`` times."""
    return max(words.groups, math.ceil(words.rounds * engines * words.per_engine / words.samples))


def print_table(results: dict[int, list[dict[str, float]]]) -> None:
    """Print the medians, and by how many times CPU per token is that of the smallest run, with the spread."""
    print(f"{'engines':>8}{'groups':>8}" + "".join(f"{title:>{len(title) + 2}}" for title, _ in COLUMNS.values())
          + f"{'x CPU/token [min, max]':>26}")  # fmt: skip
    first = statistics.median(run["us_per_token"] for run in next(iter(results.values())))
    for engines, runs in results.items():
        cells = ""
        for name, (title, form) in COLUMNS.items():
            cells += f"{form.format(statistics.median(run[name] for run in runs)):>{len(title) + 2}}"
        ratios = sorted(run["us_per_token"] / first for run in runs)
        spread = f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"
        print(f"{engines:8}{runs[0]['groups']:8.0f}{cells}{spread:>26}", flush=True)


def print_ratios(results: dict[int, list[dict[str, float]]], others: dict[int, list[dict[str, float]]]) -> None:
    """Print what the other checkout needs, over what this one needs, run by run."""
    for engines, runs in results.items():
        line = f"{engines:8} engines: the other checkout /this one:"
        for name in ("us_per_token", "stall_max_ms", "memory_mb", "ready_s", "looks"):
            ratios = sorted(
                other[name] / max(1e-9, run[name]) for run, other in zip(runs, others[engines], strict=True)
            )
            line += f"  {name} {statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"
        print(line, flush=True)


def svg(results: dict[int, list[dict[str, float]]]) -> str:
    """Draw CPU per token, the longest stall and memory per token over the number of engines, each over the first."""
    left, right, top, bottom = 56.0, 470.0, 24.0, 256.0
    curves = {
        "us_per_token": ("CPU per token", "#1f6feb"),
        "bytes_per_token": ("memory per token", "#3fb950"),
        "stall_p99_ms": ("stall, p99", "#d29922"),
    }
    counts = sorted(results)
    medians = {name: [statistics.median(run[name] for run in results[n]) for n in counts] for name in curves}
    relative = {name: [value / max(1e-9, values[0]) for value in values] for name, values in medians.items()}
    highest = max(2.0, math.ceil(max(max(values) for values in relative.values())))
    span = max(1e-9, math.log2(counts[-1] / counts[0]))

    def x(engines: int) -> float:
        return left + (right - left) * math.log2(engines / counts[0]) / span

    def y(ratio: float) -> float:
        return bottom - (bottom - top) * ratio / highest

    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 300" width="720" height="300" role="img" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#7d8590">',
        "<title>The rollout manager over the number of engines, relative to the smallest</title>",
    ]
    for ratio in range(0, int(highest) + 1, max(1, int(highest) // 4)):
        lines.append(f'<path d="M{left} {y(ratio):.1f}H{right}" stroke="#7d8590" stroke-opacity=".3"/>')
        lines.append(f'<text x="{left - 8}" y="{y(ratio) + 4:.1f}" text-anchor="end">{ratio} x</text>')
    for engines in counts:
        lines.append(f'<text x="{x(engines):.1f}" y="{bottom + 20}" text-anchor="middle">{engines}</text>')
    lines.append(f'<text x="{(left + right) / 2:.1f}" y="{bottom + 38}" text-anchor="middle">engines</text>')
    ends = sorted(curves, key=lambda name: -relative[name][-1])
    last = -math.inf
    for name in ends:
        title, color = curves[name]
        points = " ".join(f"{x(n):.1f},{y(r):.1f}" for n, r in zip(counts, relative[name], strict=True))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        last = max(last + 16, y(relative[name][-1]) + 4)  # labels below each other
        value = COLUMNS[name][1].format(medians[name][-1])
        lines.append(
            f'<text x="{right + 8}" y="{last:.1f}" fill="{color}">{title}: {relative[name][-1]:.2f} x ({value} '
            f"{COLUMNS[name][0].split()[0] if name == 'us_per_token' else COLUMNS[name][0].split()[-1]})</text>"
        )
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 64, 512, 2048])
    parser.add_argument("--per-engine", type=int, default=8, help="requests in flight per engine")
    parser.add_argument("--groups", type=int, default=1000, help="least groups of a rollout")
    parser.add_argument("--rounds", type=float, default=2.0, help="how often the engines are filled, at least")
    parser.add_argument("--samples", type=int, default=8, help="samples per group")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per response")
    parser.add_argument("--prompt", type=int, default=128, help="tokens per prompt")
    parser.add_argument("--rate", type=float, default=400.0, help="requests/s that the engines answer together")
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks that get a shard each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ray", action="store_true", help="put shards into Ray's object store")
    parser.add_argument("--no-journal", dest="journal", action="store_false", help="a run that is not resumed")
    parser.add_argument("--baseline", help="root of another checkout with this script, measured in turn")
    parser.add_argument("--svg", help="file to draw the curves into")
    parser.add_argument("--json", help="file to write every result into")
    parser.add_argument("--one", action="store_true", help="one run, in this process; prints JSON")
    parser.add_argument("--profile", help="with --one: file for cProfile of the event loop's thread")
    words = parser.parse_args()
    if words.one:
        words.engines = words.engines[0]
        print(json.dumps(run_one(words)))
        return
    results: dict[int, list[dict[str, float]]] = {engines: [] for engines in words.engines}
    others: dict[int, list[dict[str, float]]] = {engines: [] for engines in words.engines}
    for _ in range(words.repeats):
        for engines in words.engines:
            groups = groups_for(words, engines)
            results[engines].append(spawn(words, engines, groups, None))
            if words.baseline:
                others[engines].append(spawn(words, engines, groups, words.baseline))
    print_table(results)
    if words.baseline:
        print_table(others)
        print_ratios(results, others)
    loads = [run["load"] for runs in results.values() for run in runs]
    print(
        f"{words.repeats} runs each, taking turns; {words.per_engine} requests in flight per engine, groups of "
        f"{words.samples}, {words.prompt} + {words.tokens} tokens, {words.rate:g} requests/s; load average "
        f"{min(loads):.1f} to {max(loads):.1f}, {os.cpu_count()} cores, Python {sys.version.split()[0]}"
    )
    if words.json:
        Path(words.json).write_text(json.dumps({"runs": results, "baseline": others}, indent=1))
    if words.svg:
        Path(words.svg).write_text(svg(results))


if __name__ == "__main__":
    main()
