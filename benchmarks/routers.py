"""Cost of sglang-router and smg: start, time per request and CPU, side by side.

Stand-in engines (processes of their own) answer ``--tokens`` tokens with log-probs at once, so that the router is what
takes the time. The routers take turns, ``--rounds`` times each; the lines at the end have the ratio smg / sglang-router
over the rounds, its median and range. Latency is of one request at a time, throughput of ``--concurrency`` at a time
through the client that rollouts use, CPU is the router's own per request. ``direct`` is without a router, for both.

With ``--loop`` they take turns in whole runs of ``train.py`` instead (a tiny model, two real engines): ``start_s`` is
from the command to the first rollout, ``rollout_s`` and ``step_s`` the median seconds of generating and of a whole
step after the first two.

    python -m benchmarks.routers --rounds 5
    python -m benchmarks.routers --rounds 3 --loop 12
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil

from slime.backends.sglang_utils.router import RouterProcess
from slime.servers.http_client import HttpClient
from slime.servers.types import EngineInfo
from tests.support.engines import engine_args
from tests.support.run_train import Run, rl_flags, sums_file
from tests.support.standin.process import standin_process
from tools.tiny_model import make_tiny_checkpoint

PACKAGES = ("sglang_router", "smg")


@dataclass
class Cost:
    """Of one round of one router."""

    start_s: float
    latency_ms: float
    requests_per_s: float
    cpu_ms: float
    memory_mb: float


async def ask(url: str, payload: dict[str, object], alone: int, together: int, concurrency: int) -> tuple[float, float]:
    """Return the median seconds of a request on its own, and requests per second of many."""
    client = HttpClient(concurrency)
    try:
        times = []
        for _ in range(alone):
            began = time.monotonic()
            await client.post(f"{url}/generate", payload)
            times.append(time.monotonic() - began)
        left = iter(range(together))

        async def one_by_one() -> None:
            for _ in left:
                await client.post(f"{url}/generate", payload)

        began = time.monotonic()
        await asyncio.gather(*(one_by_one() for _ in range(concurrency)))
        return statistics.median(times), together / (time.monotonic() - began)
    finally:
        await client.close()


def _payload(words: argparse.Namespace) -> dict[str, object]:
    limit = {"max_new_tokens": words.tokens}
    return {"input_ids": list(range(words.prompt)), "sampling_params": limit, "return_logprob": True}


def measure(package: str, engines: list[str], words: argparse.Namespace, folder: Path) -> Cost:
    """Start the router of ``package``, ask it, and end it."""
    args = engine_args("none", sglang_router_package=package)
    router = RouterProcess(args, "127.0.0.1", log_path=folder / f"{package}.log")
    began = time.monotonic()
    try:
        router.start()
        router.wait_ready()
        start = time.monotonic() - began
        for url in engines:
            router.add_engine(EngineInfo(url))
        process = psutil.Process(router.pid)
        before = sum(process.cpu_times()[:2])
        alone, rate = asyncio.run(ask(router.url, _payload(words), words.alone, words.requests, words.concurrency))
        spent = sum(process.cpu_times()[:2]) - before
        asked = words.alone + words.requests
        return Cost(start, 1e3 * alone, rate, 1e3 * spent / asked, process.memory_info().rss / 1e6)
    finally:
        router.stop()


@dataclass
class LoopCost:
    """Of one run of ``train.py``."""

    start_s: float
    rollout_s: float
    step_s: float


def measure_loop(package: str, words: argparse.Namespace, folder: Path) -> LoopCost:
    """Train for ``--loop`` rollouts with the router of ``package``."""
    flags = rl_flags(folder / "model", folder / "sums.jsonl")
    more = f"""--rollout-num-gpus 2 --num-rollout {words.loop} --rollout-max-response-len 64
        --sglang-router-package {package} --custom-rm-path tests.support.rollout_hooks.parity_reward"""
    began = time.monotonic()
    with Run([*flags, *more.split()], folder / f"run_{began:.0f}") as run:
        run.wait_for(r"rollout 0 of ", 600)
        first = time.monotonic() - began
        done = run.finish(60.0 * words.loop)
    assert done.returncode == 0, done.output
    stages = [done.metric(f"perf/stage/{name}_time") for name in ("generate", "train", "sync_weights")]
    seconds = [[stage[step] for stage in stages] for step in range(2, words.loop)]
    generating = statistics.median(generate for generate, *_ in seconds)
    return LoopCost(first - sum(stage[0] for stage in stages), generating, statistics.median(map(sum, seconds)))


def table(costs: Mapping[str, Sequence[Cost | LoopCost]]) -> list[str]:
    """Return a line per quantity: medians of both, and the ratio of every round's pair, median and range."""
    lines = []
    for name in asdict(costs["smg"][0]):
        first, second = ([getattr(cost, name) for cost in costs[package]] for package in PACKAGES)
        ratios = [b / a for a, b in zip(first, second, strict=True)]
        lines.append(
            f"{name:15} sglang-router {statistics.median(first):9.2f}   smg {statistics.median(second):9.2f}   "
            f"ratio {statistics.median(ratios):5.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        )
    return lines


def compare_loops(words: argparse.Namespace) -> None:
    """Print what whole runs with either router take."""
    costs: dict[str, list[LoopCost]] = {package: [] for package in PACKAGES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_checkpoint(folder / "model")
        sums_file(folder / "sums.jsonl")
        for number in range(words.rounds):
            for package in PACKAGES if number % 2 == 0 else PACKAGES[::-1]:
                costs[package].append(measure_loop(package, words, folder))
                print(package, SimpleNamespace(**asdict(costs[package][-1])), flush=True)
    print("\n".join(table(costs)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=400, help="tokens")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--alone", type=int, default=200, help="requests one at a time")
    parser.add_argument("--requests", type=int, default=2000, help="requests --concurrency at a time")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--loop", type=int, default=0, help="rollouts of whole runs of train.py (at least 4)")
    words = parser.parse_args()
    if words.loop:
        compare_loops(words)
        return
    costs: dict[str, list[Cost]] = {package: [] for package in PACKAGES}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        engines = [stack.enter_context(standin_process("--tokens", words.tokens)) for _ in range(words.engines)]
        for number in range(words.rounds):
            for package in PACKAGES if number % 2 == 0 else PACKAGES[::-1]:
                costs[package].append(measure(package, engines, words, Path(folder)))
                print(package, SimpleNamespace(**asdict(costs[package][-1])), flush=True)
        latency, rate = asyncio.run(ask(engines[0], _payload(words), words.alone, words.requests, words.concurrency))
        print(f"direct to one engine: {1e3 * latency:.2f} ms alone, {rate:.0f} requests/s")
    print("\n".join(table(costs)))


if __name__ == "__main__":
    main()
