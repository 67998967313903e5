"""Changes that real engines take in place: their weights are, to the bit, those of a full load."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from slime.backends.sglang_utils.engine import EngineProcess
from slime.utils.process_supervisor import descendants
from slime.weight_sync import WeightSyncError
from tests.support.engines import engine_args
from tests.support.in_place_run import InPlaceRun
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]

KINDS = {
    "shards of fused layers": ("qwen3", 2, "float32"),
    "parameters of another type than what is sent": ("qwen3", 1, "bfloat16"),
    "experts": ("qwen3_moe", 1, "float32"),
}
PUSHES = 50


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("in_place")


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[Mapping[str, EngineProcess]]:
    """One engine of every kind, started at the same time."""
    started = {}
    try:
        for rank, (name, (family, ranks, dtype)) in enumerate(KINDS.items()):
            path = folder / family
            checkpoint = path if path.exists() else make_tiny_checkpoint(path, family)
            args = engine_args(checkpoint, sglang_dtype=dtype, rollout_num_gpus_per_engine=ranks)
            log = folder / f"engine_{rank}.log"
            started[name] = EngineProcess(args, rank=rank, host="127.0.0.1", log_path=log)
            started[name].start()
        for engine in started.values():
            engine.wait_ready()
        yield started
    finally:
        for engine in started.values():
            engine.stop()


def check(run: InPlaceRun, engine: EngineProcess, export: Path, version: int) -> None:
    """Assert that the engine has the same weights as after loading the trainer's weights from files."""
    client = engine.client(120)
    assert client.weight_version() == str(version)
    pushed = client.weights_checksum()
    client.update_weights_from_disk(str(run.export(export)), weight_version=str(version))
    assert client.weights_checksum() == pushed, version


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_and_families(
    kind: str, engines: Mapping[str, EngineProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines[kind]
    run = InPlaceRun(Path(engine.args.hf_checkpoint), monkeypatch)
    densities = []
    for number, part in enumerate((0.5, 0.02, 0.0, 0.1, 0.25), start=1):
        run.train(part)
        assert run.push([engine.info]) == number
        densities.append(run.transport.density)
        check(run, engine, tmp_path / f"export{number}", number)
    run.updater.disconnect()
    assert densities[0] == 1.0
    assert all(abs(found - part) < 0.01 for found, part in zip(densities[1:], (0.02, 0.0, 0.1, 0.25), strict=True))


def test_many_pushes_with_kills(
    engines: Mapping[str, EngineProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines are killed and trainers are lost in the middle of pushes, and engines are late."""
    chance = random.Random(0)
    steady, victim = list(engines.values())[:2]
    serving = [steady, victim]
    checkpoint = Path(steady.args.hf_checkpoint)
    flags: dict[str, Any] = {"update_weight_delta_full_interval": 9, "update_weight_buffer_size": 20_000}
    run = InPlaceRun(checkpoint, monkeypatch, **flags)
    events = {
        12: "kill an engine",
        20: "lose the trainer",
        27: "kill an engine",
        33: "other weights",
        41: "lose the trainer",
    }
    changed, late = 0, 0
    for number in range(PUSHES):
        if number == late and victim not in serving:
            victim.wait_ready()
            serving.append(victim)
        run.train(chance.choice((0.0, 0.003, 0.02, 0.1, 0.25, 0.5)))
        event = events.get(number)
        if event == "other weights":
            steady.client(120).update_weights_from_disk(str(checkpoint), weight_version="other")
        elif event is not None:
            run.train(0.1)
            strike_within_a_push(run, serving, victim if event == "kill an engine" else None, chance.randrange(1, 9))
            if event == "kill an engine":
                serving.remove(victim)
                victim.stop()
                victim.start()
                late = number + 3
            else:
                weights, pushes = run.weights, run.pushes
                run = InPlaceRun(checkpoint, monkeypatch, **flags)
                run.weights.update(weights)
                run.pushes = pushes
        version = run.push([engine.info for engine in serving])
        changed += run.transport.density < 1
        for engine in serving:
            check(run, engine, tmp_path / f"export{number}-{engine.info.rank}", version)
    run.updater.disconnect()
    assert victim in serving
    assert changed > PUSHES / 2


def strike_within_a_push(
    run: InPlaceRun, serving: list[EngineProcess], victim: EngineProcess | None, after: int
) -> None:
    """Kill ``victim``, or end this trainer's push, when so many buckets or messages have been sent."""
    group = run.transport._group
    assert group is not None
    send, sent = group.send, 0

    def send_and_strike(*args: Any, **kwargs: Any) -> None:
        nonlocal sent
        sent += 1
        if sent == after and victim is not None and victim.pid is not None:
            for pid in [victim.pid, *descendants(victim.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif sent == after:
            raise WeightSyncError("the trainer is lost")
        send(*args, **kwargs)

    group.send = send_and_strike  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError):
        run.push([engine.info for engine in serving])
    run.updater.disconnect()
