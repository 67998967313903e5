"""Requests per second of slime's HTTP client and of an httpx client that does the same work, and their p99 latency.

Both POST the same request to the same stand-in engine (a process of its own) and parse its reply; they take turns, so
that a change of load hits both. httpx is no dependency of slime itself: ``pip install httpx``.

    python -m benchmarks.client --tokens 16 8192 --concurrency 32 256 --repeats 7
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from slime.servers.http_client import HttpClient
from tests.support.standin.process import standin_process

Post = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
WAYS = ("slime", "httpx", "httpx + orjson")


@dataclass
class Result:
    """One run: requests/s of wall-clock time and of the client's processor time, and p99 latency (ms)."""

    per_second: float
    per_cpu_second: float
    p99: float


def request(tokens: int) -> dict[str, Any]:
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": tokens, "no_stop_trim": True}
    return {"input_ids": list(range(100, 356)), "sampling_params": params, "return_logprob": True}


async def drive(post: Post, url: str, tokens: int, concurrency: int, count: int) -> Result:
    """``count`` requests, ``concurrency`` at a time; AssertionError for a reply that is not as long as asked for."""
    todo = iter(range(count))
    latencies: list[float] = []

    async def work() -> None:
        for _ in todo:
            began = time.perf_counter()
            reply = await post(f"{url}/generate", request(tokens))
            latencies.append(time.perf_counter() - began)
            assert len(reply["meta_info"]["output_token_logprobs"]) == tokens

    began, cpu_began = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return Result(count / seconds, count / cpu_seconds, sorted(latencies)[int(0.99 * (count - 1))] * 1e3)


async def run_way(way: str, url: str, tokens: int, concurrency: int, count: int) -> Result:
    """One run with a fresh client whose connections have been opened."""
    if way == "slime":
        client = HttpClient(concurrency)
        try:
            await drive(client.post, url, tokens, concurrency, concurrency)
            return await drive(client.post, url, tokens, concurrency, count)
        finally:
            await client.close()
    import httpx

    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as other:

        async def post(url: str, payload: dict[str, Any]) -> dict[str, Any]:
            reply = await other.post(url, json=payload)
            reply.raise_for_status()
            parsed: dict[str, Any] = reply.json() if way == "httpx" else orjson.loads(reply.content)
            return parsed

        await drive(post, url, tokens, concurrency, concurrency)
        return await drive(post, url, tokens, concurrency, count)


def compare(tokens: int, concurrency: int, repeats: int, seconds: float) -> None:
    """Print one line per way: medians over the repeats, and the ratio of slime to it, run by run."""
    results: dict[str, list[Result]] = {way: [] for way in WAYS}
    with standin_process("--tokens", tokens) as url:
        counts = {}
        for way in WAYS:
            trial = asyncio.run(run_way(way, url, tokens, concurrency, 2 * concurrency))
            counts[way] = max(2 * concurrency, int(trial.per_second * seconds))
        for _ in range(repeats):
            for way in WAYS:
                results[way].append(asyncio.run(run_way(way, url, tokens, concurrency, counts[way])))
    for way in WAYS:
        rates = [one.per_second for one in results[way]]
        cpu = statistics.median(one.per_cpu_second for one in results[way])
        p99 = statistics.median(one.p99 for one in results[way])
        ratios = sorted(ours.per_second / its for ours, its in zip(results["slime"], rates, strict=True))
        cpu_ratio = statistics.median(one.per_cpu_second for one in results["slime"]) / cpu
        print(
            f"{tokens:6}{concurrency:6}  {way:15}{statistics.median(rates):10.0f}{cpu:12.0f}{p99:10.1f}"
            f"{statistics.median(ratios):9.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]{cpu_ratio:9.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 8192], help="lengths of replies")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[32, 256], help="requests at a time")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long one run takes")
    words = parser.parse_args()
    print(f"{'tokens':>6}{'conc.':>6}  {'client':15}{'req/s':>10}{'req/CPU s':>12}{'p99 ms':>10}"
          f"{'slime is x times [min, max]':>29}{'in CPU':>7}")  # fmt: skip
    for tokens in words.tokens:
        for concurrency in words.concurrency:
            compare(tokens, concurrency, words.repeats, words.seconds)
    print(f"{words.repeats} runs each, taking turns; load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
