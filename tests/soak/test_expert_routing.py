"""Engines with expert parallelism are handed each rank's experts, and hold what they load from files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from slime.backends.sglang_utils.engine import EngineProcess
from tests.support.distributed import run_distributed
from tests.support.engines import engine_args
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]

LAYOUTS = {
    "EP2": ["--expert-model-parallel-size", "2"],
    "TP2": ["--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "1", "--sequence-parallel"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make_tiny_checkpoint(folder / f"model{seed}", "qwen3_moe", seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def engine(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine of two ranks with half of the experts each: it takes weights, but on a CPU it cannot generate."""
    args = engine_args(models[0], rollout_num_gpus_per_engine=2, sglang_ep_size=2, sglang_skip_server_warmup=True)
    engine = EngineProcess(args, rank=0, host="127.0.0.1", log_path=tmp_path_factory.mktemp("log") / "engine.log")
    engine.start()
    try:
        client, end = engine.client(timeout=10), time.monotonic() + 180
        while not client.is_healthy(timeout=5):
            assert engine.poll() is None, engine.last_lines(50)
            assert time.monotonic() < end, engine.last_lines(50)
            time.sleep(0.5)
        yield engine
    finally:
        engine.stop()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_gets_its_own_experts(layout: str, engine: EngineProcess, models: list[Path], capsys: Any) -> None:
    client = engine.client(timeout=120)
    client.update_weights_from_disk(str(models[1]), weight_version="loaded")
    expected = client.weights_checksum()
    client.update_weights_from_disk(str(models[0]), weight_version="old")
    assert client.weights_checksum() != expected
    arguments = {
        "checkpoint": str(models[1]), "engines": [{**asdict(engine.info), "gpu_offset": 0}], "colocate": True,
        "flags": ["--update-weight-buffer-size", "20000", *LAYOUTS[layout]],  # some buckets have nothing for a rank
    }  # fmt: skip
    results = run_distributed("tests.support.weight_sync_ranks:push", 2, arguments, timeout=300)
    assert client.weights_checksum() == expected
    sizes = {name: tensor.nbytes for name, tensor in load_file(models[1] / "model.safetensors").items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    sent = [rank["bytes"][0] for rank in results]
    with capsys.disabled():
        print(f"\n{layout}: bytes to each engine rank {sent}, of {sum(sizes.values())} with {experts} of experts")
    assert sent == [sum(sizes.values()) - experts // 2] * 2
