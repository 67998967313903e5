"""Shared by the benchmarks of the default rollout: its arguments, its prompts, and runs of several rollouts."""

from __future__ import annotations

import asyncio
import itertools
import time
from argparse import Namespace
from dataclasses import dataclass
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

from slime.rollout import sglang_rollout
from slime.servers import http_utils
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.support.arguments import run_args
from tests.support.standin.process import stats

PROMPT = list(range(100, 164))


def rollout_args(url: str, **values: Any) -> Namespace:
    """The arguments that the default rollout reads, for one engine at ``url`` that needs no router."""
    address = urlsplit(url)
    defaults: dict[str, Any] = {
        "hf_checkpoint": "",
        "n_samples_per_prompt": 8,
        "rm_type": "random",
        "rollout_max_response_len": 1 << 20,
        "rollout_num_engines": 1,
        "rollout_request_timeout": 600.0,
        "rollout_seed": 0,
        "sglang_router_ip": address.hostname,
        "sglang_router_port": address.port,
    }
    return run_args(**{**defaults, **values})


class Prompts:
    """Endless groups of one prompt; what is handed back comes first."""

    def __init__(self, samples_per_prompt: int) -> None:
        self.samples_per_prompt = samples_per_prompt
        self.numbers = itertools.count()
        self.handed_back: list[list[Sample]] = []

    def get_samples(self, count: int) -> list[list[Sample]]:
        taken, self.handed_back = self.handed_back[:count], self.handed_back[count:]
        return taken + [self._group() for _ in range(count - len(taken))]

    def _group(self) -> list[Sample]:
        number = next(self.numbers)
        first = number * self.samples_per_prompt
        return [
            Sample(prompt="", tokens=list(PROMPT), index=first + i, group_index=number)
            for i in range(self.samples_per_prompt)
        ]


@dataclass
class Run:
    """Cost of several rollouts in a row (s of wall-clock and of processor time), for how long requests were in flight
    in all, the response tokens that were returned and those kept for rollouts to come, and what the engine counted."""

    seconds: float
    cpu_seconds: float
    in_flight_seconds: float
    samples: int
    trained_tokens: int
    kept_tokens: int
    counts: dict[str, float]

    def slot_use(self, slots: int) -> float:
        """Share of the time of the engine's ``slots`` slots in which they ran a request."""
        return self.counts["slot_seconds"] / (slots * self.seconds)


class Stopwatch:
    """``post`` of the rollout's HTTP helpers, that adds up for how long requests were in flight."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def post(self, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            return await http_utils.post(*args, **kwargs)
        finally:
            self.seconds += time.monotonic() - began


def run_rollouts(url: str, args: Namespace, rollouts: int) -> Run:
    """Collect ``rollouts`` rollouts one after the other through the default rollout function."""
    SingletonMeta.clear_instances()
    http_utils.init_http_client(args)
    try:
        watch = Stopwatch()
        with mock.patch.multiple(sglang_rollout, load_tokenizer=mock.Mock(return_value=None), post=watch.post):
            return asyncio.run(_run_rollouts(url, args, rollouts, watch))
    finally:
        SingletonMeta.clear_instances()
        http_utils._http_client = None


async def _run_rollouts(url: str, args: Namespace, rollouts: int, watch: Stopwatch) -> Run:
    prompts = Prompts(args.n_samples_per_prompt)
    before = stats(url)
    began, cpu_began = time.monotonic(), time.process_time()
    samples = tokens = 0
    for rollout_id in range(rollouts):
        output, handed_back = await sglang_rollout.generate_rollout_async(args, rollout_id, prompts.get_samples)
        prompts.handed_back += handed_back
        for group in output.samples:
            samples += len(group)
            tokens += sum(sample.response_length for sample in group)
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu_began
    after = stats(url)
    await http_utils.get_http_client().close()
    kept = sum(sample.response_length for group in prompts.handed_back for sample in group)
    counts = {name: after[name] - before[name] for name in after}
    return Run(seconds, cpu_seconds, watch.seconds, samples, tokens, kept, counts)
