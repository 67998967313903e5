"""Two engines with one random model: slime's attention and sampler for CPUs, and SGLang's own, which scores the other.

SGLang's engine sees every reply once, as a prompt: nothing of what happened to the other's caches happens to it.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils.engine import EngineProcess
from slime.servers.engine_client import EngineClient
from tests.support.engines import engine_args, output_log_probs
from tools.tiny_model import make_tiny_checkpoint

TOLERANCE = 5e-6
VOCABULARY = 200
"""Prompts are made of the first ids."""


@dataclass
class Pair:
    """The engine under test, the one that scores, and two checkpoints of one architecture."""

    tested: EngineClient
    stock: EngineClient
    checkpoints: tuple[Path, Path]


@contextlib.contextmanager
def pair_of_engines(root: Path, sizes: dict[str, Any], **fields: Any) -> Iterator[Pair]:
    """Start both; ``fields`` are arguments of theirs."""
    first, second = (make_tiny_checkpoint(root / f"model{i}", seed=i, **sizes) for i in (0, 1))
    engines = []
    try:
        for rank, stock in enumerate(("0", "1")):
            engine = EngineProcess(
                engine_args(first, **fields), rank=rank, host="127.0.0.1", log_path=root / f"engine_{rank}.log"
            )
            engines.append(engine)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SLIME_STOCK_CPU_ATTENTION", stock)
                engine.start()
        for engine in engines:
            engine.wait_ready()
        tested, scoring = (engine.client(timeout=600) for engine in engines)
        yield Pair(tested, scoring, (first, second))
    finally:
        for engine in engines:
            engine.stop()


@dataclass
class Crowd:
    """Requests that arrive at random moments, and what was answered."""

    pair: Pair
    seed: int
    prompts: list[list[int]]
    tokens: list[int]
    greedy: list[bool]
    doomed: list[int]
    replies: dict[int, dict[str, Any]] = field(default_factory=dict)
    pushes: int = 0

    def rid(self, i: int) -> str:
        """Id of a request."""
        return f"crowd-{self.seed}-{i}."

    def send(self, i: int, delay: float) -> None:
        """Wait, and generate."""
        time.sleep(delay)
        params = {"max_new_tokens": self.tokens[i], "temperature": 0.0 if self.greedy[i] else 1.0, "ignore_eos": True}
        body = {"rid": self.rid(i), "input_ids": self.prompts[i], "sampling_params": params, "return_logprob": True}
        self.replies[i] = self.pair.tested.generate(body)

    def abort(self, i: int, delay: float) -> None:
        """Wait until the request is under way, and abort it until it is answered: too early has no effect."""
        time.sleep(delay)
        deadline = time.monotonic() + 120
        while i not in self.replies and time.monotonic() < deadline:
            self.pair.tested.abort(self.rid(i))
            time.sleep(0.2)

    def happen(self, kind: str) -> None:
        """Do something to the engine, and let it continue."""
        engine = self.pair.tested
        engine.pause("in_place" if kind == "hold" else "retract")
        if kind != "hold":
            engine.flush_cache(30)
        if kind == "push":
            self.pushes += 1
            which = self.pushes % 2
            version = f"{which}/{self.seed}/{self.pushes}"
            engine.update_weights_from_disk(
                str(self.pair.checkpoints[which]), flush_cache=False, weight_version=version
            )
        time.sleep(0.05)
        engine.resume()


def make_crowd(pair: Pair, seed: int, requests: int, longest: int) -> Crowd:
    """Prompts with common beginnings, half of them answered greedily, one in eight to be aborted."""
    draw = random.Random(seed)
    family = [draw.randrange(VOCABULARY) for _ in range(80)]
    tails = [[draw.randrange(VOCABULARY) for _ in range(draw.choice([1, 1, 2, 9]))] for _ in range(requests)]
    prompts = [family[: draw.randrange(80)] + tail for tail in tails]
    doomed = [i for i in range(requests) if i % 8 == 0]
    tokens = [900 if i in doomed else draw.choice([1, 3, longest // 3, longest]) for i in range(requests)]
    return Crowd(pair, seed, prompts, tokens, [draw.random() < 0.5 for _ in range(requests)], doomed)


def run_crowd(pair: Pair, *, seed: int, requests: int, longest: int, seconds: float, events: int) -> str:
    """Send a crowd within ``seconds`` while ``events`` happen, and check every token; return what was found."""
    draw = random.Random(seed)
    crowd = make_crowd(pair, seed, requests, longest)
    pair.tested.update_weights_from_disk(str(pair.checkpoints[0]), weight_version=f"0/{seed}/0")
    begins = [draw.random() * seconds for _ in range(requests)]
    threads = [threading.Thread(target=crowd.send, args=(i, begin)) for i, begin in enumerate(begins)]
    # Soon after they begin: with the rest of the crowd gone a fast machine would answer 900 tokens in a second.
    threads += [threading.Thread(target=crowd.abort, args=(i, begins[i] + 0.3 * draw.random())) for i in crowd.doomed]
    for thread in threads:
        thread.start()
    for k in range(events):
        time.sleep(draw.random() * 2 * seconds / events)
        crowd.happen(("push", "flush", "hold", "push")[k % 4])
    for thread in threads:
        thread.join()
    worst, checked, crossed = check(crowd)
    aborted = sum(reply["meta_info"]["finish_reason"]["type"] == "abort" for reply in crowd.replies.values())
    cached = sum(reply["meta_info"].get("cached_tokens", 0) for reply in crowd.replies.values())
    assert len(crowd.replies) == requests
    assert min(aborted, cached, crossed) > 0, (aborted, cached, crossed)
    return (
        f"{checked} tokens of {requests} requests, {aborted} of them aborted, {crossed} under several versions; "
        f"{cached} tokens cached; log-probs differ by at most {worst:.1e}"
    )


def check(crowd: Crowd) -> tuple[float, int, int]:
    """Compare with SGLang's own: largest difference of log-probs, tokens, requests that saw a push."""
    worst, checked = 0.0, 0
    for which, checkpoint in enumerate(crowd.pair.checkpoints):
        crowd.pair.stock.update_weights_from_disk(str(checkpoint))
        for i, reply in crowd.replies.items():
            output = reply["output_ids"]
            spans = [s for s in reply["meta_info"].get("weight_versions", ()) if s["version"][0] == str(which)]
            if not output or not spans:
                continue
            scores, best = score(crowd.pair.stock, crowd.prompts[i], output)
            found = output_log_probs(reply)
            for span in spans:
                part = slice(span["start"], span["end"])
                difference = (found[part] - scores[part]).abs().max().item()
                assert difference < TOLERANCE, (i, span, difference)
                if crowd.greedy[i]:
                    assert (best[part] - scores[part]).max() < TOLERANCE, (i, span)
                worst, checked = max(worst, difference), checked + span["end"] - span["start"]
    replies = crowd.replies.values()
    assert checked == sum(len(reply["output_ids"]) for reply in replies)
    return worst, checked, sum(len(reply["meta_info"].get("weight_versions", ())) > 1 for reply in replies)


def score(engine: EngineClient, prompt: list[int], output: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs of the output, and of the most probable token at every position of it."""
    reply = engine.generate(
        {
            "input_ids": prompt + output, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True,
            "logprob_start_len": 0, "top_logprobs_num": 1,
        }
    )  # fmt: skip
    meta = reply["meta_info"]
    scores = [entry[0] for entry in meta["input_token_logprobs"][len(prompt) :]]
    best = [entry[0][0] for entry in meta["input_top_logprobs"][len(prompt) :]]
    return torch.tensor(scores), torch.tensor(best)
