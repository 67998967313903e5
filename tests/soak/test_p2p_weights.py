"""Weights written into engines' memory: families, layouts and both backends; engines that are lost; the whole loop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from slime.backends.sglang_utils.engine import EngineProcess
from slime.utils.process_supervisor import descendants
from slime.weight_sync import WeightSyncError
from tests.support.engines import Reference, engine_args, output_log_probs
from tests.support.in_place_run import P2PRun
from tests.support.run_train import rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "shards of fused layers, tied": ("qwen3", {"rollout_num_gpus_per_engine": 2}),
    "biases": ("qwen2", {"rollout_num_gpus_per_engine": 2}),
    "another type than that of the trainer": ("qwen3", {"sglang_dtype": "bfloat16"}),
    "experts": ("qwen3_moe", {}),
    "shared experts": ("qwen2_moe", {}),
    "shards of experts": ("qwen3_moe", {"rollout_num_gpus_per_engine": 2}),
    # SGLang's computation of experts on a CPU lacks those of other ranks: this engine generates nothing.
    "whole experts on a rank": (
        "qwen3_moe",
        {"rollout_num_gpus_per_engine": 2, "sglang_ep_size": 2, "sglang_skip_server_warmup": True},
    ),
}
LAYOUTS = {
    "DP2": "",
    "TP2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "PP2": "--pipeline-model-parallel-size 2",
}


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["nixl", "mooncake"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return name


@pytest.mark.parametrize("kind", KINDS)
def test_engines_have_what_they_would_load(
    kind: str, backend: str, one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, fields = KINDS[kind]
    generates = "sglang_ep_size" not in fields
    checkpoint = make_tiny_checkpoint(tmp_path / "model", family)
    engine = EngineProcess(engine_args(checkpoint, **fields), rank=0, host="127.0.0.1", log_path=tmp_path / "log")
    engine.start()
    try:
        client = engine.client(120)
        if generates:
            engine.wait_ready()
        end = time.monotonic() + 180.0
        while not client.is_healthy():
            assert time.monotonic() < end, engine.last_lines(30)
            time.sleep(0.5)
        flags = {"update_weight_buffer_size": 60_000, "update_weight_p2p_backend": backend}
        run = P2PRun(checkpoint, monkeypatch, **flags)
        for number in (1, 2):
            run.train(0.5)
            assert run.push([engine.info]) == number
            assert client.weight_version() == str(number)
            pushed = client.weights_checksum()
            exported = run.export(tmp_path / f"export{number}")
            if generates and "sglang_dtype" not in fields:
                params = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}
                prompt = list(range(40, 80))
                reply = client.generate({"input_ids": prompt, "sampling_params": params, "return_logprob": True})
                expected = Reference(exported).log_probs(prompt, reply["output_ids"])
                assert (output_log_probs(reply) - expected).abs().max() <= 1e-5
            client.update_weights_from_disk(str(exported), weight_version="disk")
            assert client.weights_checksum() == pushed
        run.updater.disconnect()
    finally:
        engine.stop()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_lost_while_it_is_written_to(
    signum: signal.Signals, backend: str, one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path / "model")
    engines = [
        EngineProcess(engine_args(checkpoint), rank=rank, host="127.0.0.1", log_path=tmp_path / f"{rank}.log")
        for rank in range(2)
    ]
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready()
        flags = {"update_weight_buffer_size": 60_000, "update_weight_p2p_backend": backend, "weight_sync_timeout": 20.0}
        run = P2PRun(checkpoint, monkeypatch, **flags)
        assert run.push([engine.info for engine in engines]) == 1
        victim = engines[1]
        assert victim.pid is not None
        family = [victim.pid, *descendants(victim.pid)]
        sender = run.transport._share
        assert sender is not None
        flush, flushes = sender.flush, 0

        def flush_and_strike() -> None:
            nonlocal flushes
            flushes += 1
            if flushes == 3:
                for pid in family:
                    os.kill(pid, signum)
            flush()

        monkeypatch.setattr(sender, "flush", flush_and_strike)
        run.train(0.5)
        with pytest.raises(WeightSyncError, match=victim.info.url):
            run.updater.update()
        victim.stop()
        assert run.push([engines[0].info]) == 2
        client = engines[0].client(120)
        pushed = client.weights_checksum()
        client.update_weights_from_disk(str(run.export(tmp_path / "export")), weight_version="disk")
        assert client.weights_checksum() == pushed
        run.updater.disconnect()
    finally:
        for engine in engines:
            engine.stop()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loop(tmp_path: Path, layout: str) -> None:
    """Every push is proven by ``--check-weight-update-equal``, and engines have the trainer's log-probs."""
    flags = rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl"))
    more = f"""{LAYOUTS[layout]} --actor-num-gpus-per-node 2 --rollout-num-gpus 2 --rollout-num-gpus-per-engine 1
        --custom-rm-path tests.support.rollout_hooks.parity_reward --update-weight-transport p2p
        --check-weight-update-equal --num-rollout 4"""
    run = run_train([*flags, *more.split()], tmp_path / "run")
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert run.metric("rollout/weight_version/max") == {n: n + 1.0 for n in range(4)}
    size = sum(t.nbytes for t in load_file(tmp_path / "model" / "model.safetensors").values())
    assert set(run.metric("perf/update_weights_wire_bytes").values()) == {2.0 * size}
