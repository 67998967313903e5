"""An engine on a GPU: its log-probs, its memory onloaded and offloaded, a request that comes while it is offloaded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils.engine import EngineProcess
from slime.servers.engine_client import EngineClient
from tests.support.arguments import run_args
from tests.support.engines import Reference, output_log_probs
from tests.support.gpu import QWEN3_600M, engine_flags, memory_in_use
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.gpu

PROMPT = list(range(40, 140))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {**QWEN3_600M, "num_hidden_layers": 4}
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model") / "model", dtype="bfloat16", **sizes)


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine with the memory saver and a copy of its weights on the host: no trainer pushes to it."""
    args = run_args(
        *engine_flags(), hf_checkpoint=str(checkpoint), offload_rollout=True, engine_ready_timeout=240.0,
        sglang_api_key="engine", sglang_admin_api_key="control",
    )  # fmt: skip
    args.device_type = "cuda"
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    engine = EngineProcess(args, rank=0, host="127.0.0.1", log_path=log, update_weights=False)
    started = time.monotonic()
    try:
        engine.start()
        engine.wait_ready()
        print(f"ready after {time.monotonic() - started:.1f} s")
        yield engine
    finally:
        engine.stop()
        print(*log.read_text(errors="replace").splitlines()[-30:], sep="\n")


def in_use() -> float:
    return memory_in_use() / 2**30


def greedy(client: EngineClient, tokens: int = 64) -> dict[str, Any]:
    params = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    return dict(client.generate({"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}))


def test_log_probs_are_those_of_transformers(engine: EngineProcess, checkpoint: Path) -> None:
    """Of bf16 weights in fp32 arithmetic; the engine's is bf16."""
    reply = greedy(engine.client())
    expected = Reference(checkpoint).log_probs(PROMPT, reply["output_ids"])
    difference = (output_log_probs(reply) - expected).abs()
    print(f"log-probs differ by {difference.mean():.2e} on average, {difference.max():.2e} at most")
    assert difference.mean() < 0.02


def test_an_offloaded_engine_frees_its_memory_and_is_onloaded_unchanged(engine: EngineProcess) -> None:
    client = engine.client()
    before, awake = greedy(client), in_use()
    used = []
    for _ in range(5):
        started = time.monotonic()
        client.pause("abort")
        client.release_memory()
        released = time.monotonic()
        used.append(in_use())
        begun = time.monotonic()
        client.resume_memory()
        client.resume()
        print(f"asleep in {released - started:.2f} s, awake in {time.monotonic() - begun:.2f} s")
    print(f"GiB awake {awake:.2f}, asleep {used}, awake again {in_use():.2f}")
    assert used[0] < min(3.0, 0.2 * awake)
    assert used[-1] - used[1] < 0.05, "every sleep leaves something"
    again = greedy(client)
    assert again["output_ids"] == before["output_ids"]
    assert torch.equal(output_log_probs(again), output_log_probs(before))


def test_throughput(engine: EngineProcess) -> None:
    """256 requests at once: a figure for the log, and decode graphs of several sizes."""
    params = {"max_new_tokens": 256, "temperature": 1.0, "ignore_eos": True}
    prompts = [[token + i % 7 for token in PROMPT] for i in range(256)]
    started = time.monotonic()
    replies = engine.client().generate({"input_ids": prompts, "sampling_params": params})
    seconds = time.monotonic() - started
    tokens = sum(reply["meta_info"]["completion_tokens"] for reply in replies)
    print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s")
    assert tokens == 256 * 256
