"""Weights from real Megatron ranks to real engines, by process group and colocated: versions, checksums, log-probs."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from slime.backends.sglang_utils.engine import EngineProcess
from slime.servers.engine_client import EngineClient
from tests.support.distributed import run_distributed
from tests.support.engines import Reference, engine_args, output_log_probs
from tests.support.in_place_run import InPlaceRun
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration

PROMPT = list(range(40, 80))
SMALL_BUCKETS = ["--update-weight-buffer-size", "60000"]


@dataclass
class Engines:
    """Two engines that started on ``old``; the trainers of the tests push ``new``."""

    processes: list[EngineProcess]
    old: Path
    new: Path

    @property
    def clients(self) -> list[EngineClient]:
        return [p.client(timeout=120) for p in self.processes]

    def infos(self) -> list[dict[str, Any]]:
        return [{**asdict(p.info), "gpu_offset": i} for i, p in enumerate(self.processes)]

    def back_to_old(self) -> None:
        for client in self.clients:
            client.update_weights_from_disk(str(self.old), weight_version="old")
            client.flush_cache()


def start(checkpoint: Path, ranks: list[int], folder: Path) -> list[EngineProcess]:
    processes = [
        EngineProcess(engine_args(checkpoint), rank=r, host="127.0.0.1", log_path=folder / f"engine_{r}.log")
        for r in ranks
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.wait_ready()
    except BaseException:
        for process in processes:
            process.stop()
        raise
    return processes


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("weight_sync")
    old, new = (make_tiny_checkpoint(folder / f"model{seed}", seed=seed) for seed in (0, 1))
    processes = start(old, [0, 1], folder)
    try:
        yield Engines(processes, old, new)
    finally:
        for process in processes:
            process.stop()


def generate(client: EngineClient, prompt: list[int], tokens: int) -> dict[str, Any]:
    params = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
    return dict(client.generate(body, timeout=300))


def run_push(engines: Engines, flags: list[str], **keywords: Any) -> list[dict[str, Any]]:
    arguments = {
        "checkpoint": str(engines.new),
        "engines": engines.infos(),
        "flags": [*SMALL_BUCKETS, *flags],
        **keywords,
    }
    return run_distributed("tests.support.weight_sync_ranks:push", 2, arguments, timeout=300)


def test_two_pipeline_stages_push_while_requests_are_in_flight(engines: Engines, tmp_path: Path) -> None:
    engines.back_to_old()
    client = engines.clients[0]
    generate(client, PROMPT, 2)
    assert generate(client, PROMPT, 1)["meta_info"]["cached_tokens"] > 0
    stop = threading.Event()
    replies: list[dict[str, Any]] = []

    def keep_asking(prompt: list[int]) -> None:
        while not stop.is_set():
            replies.append(generate(client, prompt, 600))

    threads = [threading.Thread(target=keep_asking, args=([100 + i, 7, 8, 9],)) for i in range(2)]
    for thread in threads:
        thread.start()
    try:
        export = tmp_path / "export"
        results = run_push(
            engines,
            ["--pipeline-model-parallel-size", "2"],
            synchronous_loop=False,
            export_to=str(export),
            change_one_weight=True,
        )
    finally:
        time.sleep(0.5)
        stop.set()
        for thread in threads:
            thread.join(300)
    # Every request that crossed a push ended as it would have without one, with tokens of both versions.
    assert {r["meta_info"]["finish_reason"]["type"] for r in replies} == {"length"}
    assert all(len(r["output_ids"]) == 600 for r in replies)
    crossing = [r for r in replies if len(r["meta_info"]["weight_versions"]) > 1]
    assert crossing, [r["meta_info"]["weight_versions"] for r in replies]

    assert [r["versions"] for r in results] == [[1, 2], [1, 2]]
    size = sum(t.nbytes for t in load_file(engines.new / "model.safetensors").values())
    assert sum(r["bytes"][0] for r in results) == size
    assert [c.weight_version() for c in engines.clients] == ["2", "2"]
    pushed = {c.weights_checksum() for c in engines.clients}
    assert len(pushed) == 1

    # The export holds the weights of the first push; the second one changed a single weight.
    (fresh,) = start(export, [2], tmp_path)
    try:
        exported = fresh.client(timeout=120).weights_checksum()
        assert exported not in pushed
        prompt_reply = generate(fresh.client(timeout=120), PROMPT, 5)
        expected = Reference(engines.new).log_probs(PROMPT, prompt_reply["output_ids"])
        assert (output_log_probs(prompt_reply) - expected).abs().max() <= 1e-5
    finally:
        fresh.stop()
    client.update_weights_from_disk(str(export), weight_version="1")
    assert client.weights_checksum() == exported


def test_colocated_tensor_ranks_push_to_the_engine_on_their_slot(engines: Engines) -> None:
    engines.back_to_old()
    for client in engines.clients:
        generate(client, PROMPT, 2)
    results = run_push(engines, ["--tensor-model-parallel-size", "2", "--sequence-parallel"], colocate=True)
    assert [r["versions"] for r in results] == [[1, 2], [1, 2]]
    assert [c.weight_version() for c in engines.clients] == ["2", "2"]
    assert len({c.weights_checksum() for c in engines.clients}) == 1
    # A prompt that was cached before the push has the new weights' log-probs after it.
    reference = Reference(engines.new)
    for client in engines.clients:
        reply = generate(client, PROMPT, 5)
        error = (output_log_probs(reply) - reference.log_probs(PROMPT, reply["output_ids"])).abs().max()
        assert error <= 1e-5
    pushed = engines.clients[0].weights_checksum()
    engines.clients[0].update_weights_from_disk(str(engines.new), weight_version="new")
    assert engines.clients[0].weights_checksum() == pushed


def test_two_stages_write_into_the_memory_of_engines(engines: Engines, tmp_path: Path) -> None:
    """Two trainers, each with half of the layers, write to two engines at once; one of the engines is then lost."""
    engines.back_to_old()
    for client in engines.clients:
        generate(client, PROMPT, 2)
    flags = ["--pipeline-model-parallel-size", "2", "--update-weight-transport", "p2p"]
    results = run_push(engines, flags, change_one_weight=True, export_to=str(tmp_path / "export"))
    assert [r["versions"] for r in results] == [[1, 2], [1, 2]]
    size = sum(t.nbytes for t in load_file(engines.new / "model.safetensors").values())
    for push in range(2):
        sent = [r["bytes"][push] for r in results]
        assert sum(sent) == 2 * size
        assert min(sent) > 0
    assert [c.weight_version() for c in engines.clients] == ["2", "2"]
    first, second = (c.weights_checksum() for c in engines.clients)
    assert first == second
    # A prompt that was cached before has the new weights' log-probs, which one changed weight leaves where they were.
    reply = generate(engines.clients[1], PROMPT, 5)
    expected = Reference(engines.new).log_probs(PROMPT, reply["output_ids"])
    assert 0 < (output_log_probs(reply) - expected).abs().max() <= 1e-3
    engines.clients[0].update_weights_from_disk(str(tmp_path / "export"), weight_version="export")
    assert engines.clients[0].weights_checksum() != first


def test_changes_taken_in_place_are_what_a_full_load_gives(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.back_to_old()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run = InPlaceRun(engines.new, monkeypatch, update_weight_buffer_size=60_000)
        infos = [process.info for process in engines.processes]
        densities = []
        for part in (0.0, 0.01, 0.2):
            run.train(part)
            run.push(infos)
            densities.append(run.transport.density)
        engines.clients[1].update_weights_from_disk(str(engines.old), weight_version="old")
        run.train(0.05)
        assert run.push(infos) == 4  # the second engine had other weights: both are sent all
        densities.append(run.transport.density)
        run.train(0.01)
        assert run.push(infos) == 5
        densities.append(run.transport.density)
        run.updater.disconnect()
    finally:
        dist.destroy_process_group()
    assert densities == pytest.approx([1.0, 0.01, 0.2, 1.0, 0.01], abs=0.003)
    pushed = {client.weights_checksum() for client in engines.clients}
    engines.clients[0].update_weights_from_disk(str(run.export(tmp_path / "export")), weight_version="export")
    assert pushed == {engines.clients[0].weights_checksum()}


@pytest.mark.parametrize(
    "signum",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)],
    ids=["killed", "stopped"],
)
def test_a_push_survives_an_engine_that_is_lost_in_the_middle_of_it(
    engines: Engines, tmp_path: Path, signum: signal.Signals
) -> None:
    engines.back_to_old()
    (victim,) = start(engines.old, [2], tmp_path)
    try:
        infos = [*engines.infos(), {**asdict(victim.info), "gpu_offset": 2}]
        arguments = {
            "checkpoint": str(engines.new),
            "engines": infos,
            "flags": [*SMALL_BUCKETS, "--tensor-model-parallel-size", "2", "--sequence-parallel"],
            "victim": victim.pid,
            "signum": int(signum),
            "timeout": 20.0,
        }
        results = run_distributed("tests.support.weight_sync_ranks:push_without_a_victim", 2, arguments, timeout=300)
    finally:
        victim.stop()
    # Both ranks learn of it, and the second attempt carries the number of the first.
    assert [r["versions"] for r in results] == [[1, 2], [1, 2]]
    assert results[0]["reported"] == results[1]["reported"] != ""
    assert "Weight sync" in results[0]["reported"]
    assert [c.weight_version() for c in engines.clients] == ["2", "2"]
    first, second = (c.weights_checksum() for c in engines.clients)
    assert first == second
    reply = generate(engines.clients[0], PROMPT, 5)  # it is not paused any more
    expected = Reference(engines.new).log_probs(PROMPT, reply["output_ids"])
    assert (output_log_probs(reply) - expected).abs().max() <= 1e-5
