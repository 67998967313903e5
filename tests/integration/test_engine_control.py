"""One real engine behind a real router: what it computes, and how weight updates treat its requests and caches."""

from __future__ import annotations

import base64
import io
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch
from safetensors.torch import load_file

from slime.backends.sglang_utils.engine import EngineProcess
from slime.backends.sglang_utils.environment import CPU_STANDINS, ENGINE_PLUGIN
from slime.backends.sglang_utils.router import RouterProcess, list_workers
from slime.servers.engine_client import EngineClient
from slime.servers.http import EngineError
from tests.support.engines import Reference, engine_and_router, engine_args, output_log_probs
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration

KEY = "key-of-the-test-run"
OLD_PROMPT = list(range(40, 90))


@dataclass
class Setup:
    """The engine, its router and two checkpoints of one architecture with a reference for each."""

    engine: EngineProcess
    router: RouterProcess
    client: EngineClient
    checkpoints: tuple[Path, Path]
    references: tuple[Reference, Reference]

    def load(self, which: int, version: str) -> None:
        self.client.update_weights_from_disk(str(self.checkpoints[which]), weight_version=version)

    def generate(self, prompt: list[int], tokens: int, *, temperature: float = 1.0) -> dict[str, Any]:
        params = {"max_new_tokens": tokens, "temperature": temperature, "ignore_eos": True}
        return dict(
            self.client.generate({"input_ids": prompt, "sampling_params": params, "return_logprob": True}, timeout=300)
        )


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    root = tmp_path_factory.mktemp("engine")
    first, second = (make_tiny_checkpoint(root / f"model{i}", seed=i) for i in (0, 1))
    args = engine_args(first, sglang_api_key=KEY)
    with engine_and_router(args, root) as (engine, router):
        yield Setup(engine, router, engine.client(timeout=60), (first, second), (Reference(first), Reference(second)))


def in_background(calls: list[Any]) -> tuple[list[threading.Thread], list[dict[str, Any]]]:
    replies: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        replies[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    return threads, replies


def wait_until(condition: Any, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.02)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_transformers(setup: Setup, temperature: float) -> None:
    setup.load(0, "a")
    setup.client.flush_cache()
    prompt = [7, 11, 13, 17, 19, 23]
    reply = setup.generate(prompt, 24, temperature=temperature)
    assert len(reply["output_ids"]) == 24
    expected = setup.references[0].log_probs(prompt, reply["output_ids"], temperature)
    assert (output_log_probs(reply) - expected).abs().max() <= 1e-5
    # Greedy decoding repeats exactly.
    again = [setup.generate(prompt, 8, temperature=0.0)["output_ids"] for _ in range(2)]
    assert again[0] == again[1]


def test_log_probs_in_a_crowd_are_those_of_transformers(setup: Setup) -> None:
    """Requests of all lengths come and go in one batch, with and without cached prefixes; one in eight is aborted."""
    setup.load(0, "a")
    setup.client.flush_cache()
    draw = random.Random(0)
    family = [draw.randrange(200) for _ in range(70)]
    prompts = [
        family[: draw.randrange(1, 70)] + [draw.randrange(200) for _ in range(draw.choice([1, 1, 2, 9]))]
        for _ in range(72)
    ]
    tokens = [draw.choice([1, 3, 20, 60, 130]) for _ in prompts]
    aborted = [i for i in range(72) if i % 8 == 0]

    answered = [threading.Event() for _ in prompts]

    def abort(i: int) -> None:
        while not answered[i].wait(0.4):  # an abort that is faster than its request has no effect
            setup.client.abort(f"crowd-{i}")

    def request(i: int) -> dict[str, Any]:
        time.sleep(draw.random())
        if i in aborted:
            threading.Thread(target=abort, args=(i,), daemon=True).start()
            tokens[i] = 900
        params = {"max_new_tokens": tokens[i], "temperature": draw.choice([1.0, 0.6]), "ignore_eos": True}
        body = {"rid": f"crowd-{i}", "input_ids": prompts[i], "sampling_params": params, "return_logprob": True}
        try:
            return {**setup.client.generate(body, timeout=300), "temperature": params["temperature"]}
        finally:
            answered[i].set()

    threads, replies = in_background([lambda i=i: request(i) for i in range(72)])
    for thread in threads:
        thread.join(300)
    # One that is aborted before it has run has neither tokens nor a count of cached ones.
    assert max(reply["meta_info"].get("cached_tokens", 0) for reply in replies) > 0
    for i, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        output = reply["output_ids"]
        whole = len(output) == tokens[i]
        assert whole != (i in aborted), (i, len(output), tokens[i], reply["meta_info"]["finish_reason"])
        if not output:
            continue
        expected = setup.references[0].log_probs(prompt, output, reply["temperature"])
        assert torch.allclose(output_log_probs(reply), expected, rtol=0, atol=1e-5)


def test_a_paused_engine_answers_after_it_continues(setup: Setup) -> None:
    setup.load(0, "a")
    setup.client.pause("abort")
    threads, replies = in_background([lambda: setup.generate([5, 6, 7], 4)])
    time.sleep(0.5)
    assert replies == [None]
    setup.client.resume()
    threads[0].join(60)
    assert len(replies[0]["output_ids"]) == 4


def test_a_paused_engine_leaves_the_cores_to_others(setup: Setup) -> None:
    engine = psutil.Process(setup.engine.pid)
    processes = [engine, *engine.children(recursive=True)]

    def cpu_seconds() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    setup.client.pause("retract")
    before = cpu_seconds()
    time.sleep(3)
    used = cpu_seconds() - before
    setup.client.resume()
    assert used < 0.3


def test_aborting_pauses_return_what_there_is(setup: Setup) -> None:
    setup.load(0, "a")
    threads, replies = in_background([lambda: setup.generate([5] * 10, 1000)])
    wait_until(lambda: setup.client.num_requests() == 1, 30, "the request's start")
    setup.client.pause("abort")
    threads[0].join(60)
    setup.client.flush_cache(10)
    setup.client.resume()
    assert replies[0]["meta_info"]["finish_reason"]["type"] == "abort"
    output = replies[0]["output_ids"]
    assert 0 < len(output) < 1000
    expected = setup.references[0].log_probs([5] * 10, output)
    assert (output_log_probs(replies[0]) - expected).abs().max() <= 1e-5


def test_requests_in_flight_survive_an_update_and_nothing_stale_is_left(setup: Setup) -> None:
    """More requests than run at once: some have run, some wait, and a prompt is cached, when the weights change."""
    setup.load(0, "old")
    setup.generate(OLD_PROMPT, 2)
    assert setup.generate(OLD_PROMPT, 1)["meta_info"]["cached_tokens"] > 0
    prompts = [[100 + i, *range(20, 60)] for i in range(6)]
    threads, replies = in_background([lambda p=p: setup.generate(p, 900) for p in prompts])
    wait_until(lambda: setup.client.num_requests() == 6, 120, "the start of 6 requests")
    time.sleep(0.2)

    setup.client.pause("retract")
    setup.client.flush_cache(10)
    setup.client.update_weights_from_disk(str(setup.checkpoints[1]), flush_cache=False, weight_version="new")
    late_threads, late = in_background([lambda: setup.generate([9, 8, 7], 5)])
    assert setup.client.weight_version() == "new"
    time.sleep(0.2)
    assert late == [None]
    setup.client.resume()
    for thread in threads + late_threads:
        thread.join(300)

    for prompt, reply in zip(prompts, replies, strict=True):
        output, spans = reply["output_ids"], reply["meta_info"]["weight_versions"]
        assert reply["meta_info"]["finish_reason"]["type"] == "length"
        assert len(output) == 900
        assert [s["version"] for s in spans] == ["old", "new"]
        assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 900)
        split, got = spans[0]["end"], output_log_probs(reply)
        assert 0 < split < 900
        # Each part has the log-probs of the weights that it was made with, the whole prefix under those weights.
        for part, reference in zip((slice(0, split), slice(split, None)), setup.references, strict=True):
            assert (got[part] - reference.log_probs(prompt, output)[part]).abs().max() <= 1e-5
    assert [s["version"] for s in late[0]["meta_info"]["weight_versions"]] == ["new"]
    fresh = setup.generate(OLD_PROMPT, 5)
    expected = setup.references[1].log_probs(OLD_PROMPT, fresh["output_ids"])
    assert (output_log_probs(fresh) - expected).abs().max() <= 1e-5


def test_a_cache_that_is_not_flushed_is_stale(setup: Setup) -> None:
    """The check above can fail: the same prompt, without the flush, has log-probs of no checkpoint."""
    setup.load(0, "old")
    setup.generate(OLD_PROMPT, 2)
    setup.client.update_weights_from_disk(str(setup.checkpoints[1]), flush_cache=False, weight_version="new")
    stale = setup.generate(OLD_PROMPT, 5)
    setup.client.flush_cache()
    expected = setup.references[1].log_probs(OLD_PROMPT, stale["output_ids"])
    assert (output_log_probs(stale) - expected).abs().max() > 1e-3


def send_tensors(client: EngineClient, tensors: dict[str, torch.Tensor]) -> None:
    buffer = io.BytesIO()
    pickle.Pickler(buffer).dump(list(tensors.items()))
    client.update_weights_from_tensor(serialized_named_tensors=[base64.b64encode(buffer.getvalue()).decode()])


def test_the_weight_check_notices_one_changed_weight(setup: Setup) -> None:
    setup.load(0, "a")
    client = setup.client
    weights = load_file(setup.checkpoints[0] / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    changed = weights[name].clone()
    changed[3, 5] += 1e-6
    checksum = client.weights_checksum()
    client.weights_checker("snapshot")
    client.weights_checker("compare")

    send_tensors(client, {name: changed})
    assert client.weights_checksum() != checksum
    with pytest.raises(EngineError, match=f"check tensor equality failed.*{name}.*num_exceed=1 "):
        client.weights_checker("compare")

    send_tensors(client, {name: weights[name]})
    client.weights_checker("compare")
    assert client.weights_checksum() == checksum

    client.weights_checker("reset_tensors")
    with pytest.raises(EngineError, match=r"name=model\.embed_tokens\.weight"):
        client.weights_checker("compare")
    send_tensors(client, weights)
    client.weights_checker("compare")
    assert client.weights_checksum() == checksum
    setup.load(1, "b")
    assert client.weights_checksum() != checksum


def test_tensors_travel_without_shared_memory(setup: Setup) -> None:
    before = set(os.listdir("/dev/shm"))
    send_tensors(setup.client, load_file(setup.checkpoints[0] / "model.safetensors"))
    assert set(os.listdir("/dev/shm")) - before == set()


def test_the_stand_ins_are_visible_to_the_engine_only(setup: Setup) -> None:
    names = ["sgl_kernel", "slime_engine_plugin", "triton", "torchvision"]
    probe = f"import importlib.util as u; print([getattr(u.find_spec(n), 'origin', None) for n in {names}])"

    def found_with(env: dict[str, str]) -> str:
        return subprocess.run(
            [sys.executable, "-c", probe], env=env, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    def environ_of(pid: int | None) -> dict[str, str]:
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode()
        return dict(entry.split("=", 1) for entry in raw.split("\0") if entry)

    engine = found_with(environ_of(setup.engine.pid))
    assert str(CPU_STANDINS / "sgl_kernel") in engine
    assert str(ENGINE_PLUGIN) in engine
    for env in (dict(os.environ), environ_of(setup.router.pid)):
        other = found_with(env)
        assert str(CPU_STANDINS) not in other
        assert str(ENGINE_PLUGIN) not in other


def test_a_router_sends_requests_to_registered_engines(setup: Setup) -> None:
    url, engine = setup.router.url, setup.engine.info
    request = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
    auth = {"Authorization": f"Bearer {KEY}"}
    status = requests.post(f"{url}/generate", json=request, headers=auth, timeout=60).status_code
    assert status == {"sglang_router": 503, "smg": 404}[setup.router.package]
    setup.router.add_engine(engine)
    try:
        assert [w["url"] for w in list_workers(url, api_key=KEY)] == [engine.url]
        reply = requests.post(f"{url}/generate", json=request, headers=auth, timeout=60)
        assert reply.status_code == 200
        assert len(reply.json()["output_ids"]) == 2
        # While an engine pauses for new weights it stays registered, and its requests wait.
        setup.client.pause("retract")
        threads, replies = in_background(
            [lambda: requests.post(f"{url}/generate", json=request, headers=auth, timeout=60)]
        )
        time.sleep(0.5)
        assert replies == [None]
        setup.client.resume()
        threads[0].join(60)
        assert replies[0].status_code == 200
    finally:
        assert setup.router.remove_engine(engine)
    wait_until(lambda: not list_workers(url, api_key=KEY), 10, "the removal")
    assert not setup.router.remove_engine(engine)


def test_without_the_key_no_request_is_served(setup: Setup) -> None:
    request = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
    url = setup.engine.info.url
    for path in ("/generate", "/update_weights_from_tensor", "/load_lora_adapter_from_tensors", "/pause_generation"):
        assert requests.post(f"{url}{path}", json=request, timeout=60).status_code == 401, path
    with pytest.raises(EngineError, match="401"):
        EngineClient(url, api_key="wrong").pause()
    assert requests.get(f"{url}/health", timeout=60).status_code == 200
    setup.router.add_engine(setup.engine.info)
    try:
        assert requests.post(f"{setup.router.url}/generate", json=request, timeout=60).status_code == 401
    finally:
        setup.router.remove_engine(setup.engine.info)


def test_the_key_shows_in_no_command_line(setup: Setup) -> None:
    commands = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            commands.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue  # it has just ended
    assert any("launch_server" in c for c in commands)
    assert not any(KEY in c for c in commands)
    assert setup.engine.log_path.stat().st_mode & 0o077 == 0


def test_a_running_engine_is_not_started_twice(setup: Setup) -> None:
    with pytest.raises(RuntimeError, match="runs already"):
        setup.engine.start()
    assert setup.engine.poll() is None
