"""The order of a push, its version, and what happens when an engine fails or lies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from slime.servers.types import EngineInfo
from slime.weight_sync import resolve_pause_mode
from slime.weight_sync import updater as updater_module
from slime.weight_sync.fanout import FanOut, WeightSyncError
from slime.weight_sync.updater import WeightUpdater
from tests.support.arguments import run_args


class Engine:
    """An engine that records the calls it gets."""

    def __init__(self, url: str, log: list[str], reports: str | None = None, broken: str | None = None) -> None:
        self.url, self.log, self.reports, self.broken = url, log, reports, broken
        self.version = "0"

    def _note(self, what: str) -> None:
        if self.broken == what:
            raise RuntimeError(f"no {what} today")
        self.log.append(what)

    def health(self, timeout: float) -> None:
        self._note("health")

    def pause(self, mode: str) -> None:
        self._note(f"pause {mode}")

    def flush_cache(self, deadline: float) -> None:
        self._note("flush")

    def weight_version(self) -> str:
        self._note("version")
        return self.reports or self.version

    def resume(self) -> None:
        self._note("continue")


class Transport:
    def __init__(self, log: list[str], engines: list[Engine]) -> None:
        self.log, self.engines = log, engines

    def connect(self, engines: Any, clients: Any) -> None:
        self.log.append("connect")

    def prepare(self, source: Any) -> None:
        self.log.append("prepare")

    def send(self, source: Any, *, weight_version: str) -> int:
        self.log.append(f"send {weight_version}")
        for engine in self.engines:
            engine.version = weight_version
        return 7

    def disconnect(self) -> None:
        self.log.append("disconnect")


@pytest.fixture(autouse=True)
def one_rank() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def updater_with(engines: list[Engine], log: list[str], pause_mode: str | None = "abort") -> WeightUpdater:
    updater = WeightUpdater(
        run_args(weight_sync_timeout=5.0), SimpleNamespace(), Transport(log, engines), pause_mode=pause_mode
    )
    updater._engines = [SimpleNamespace(url=e.url) for e in engines]  # type: ignore[misc]
    updater._control = FanOut(engines)
    return updater


def test_a_push_pauses_flushes_sends_verifies_and_continues_in_this_order() -> None:
    log: list[str] = []
    updater = updater_with([Engine("http://a", log)], log)
    assert updater.update() == 1
    assert updater.update() == 2
    once = ["prepare", "pause abort", "flush", "send 1", "version", "continue"]
    assert log == once + [line.replace("1", "2") for line in once]
    assert updater.bytes_sent == 7


def test_engines_that_are_not_paused_are_only_asked_for_their_version() -> None:
    log: list[str] = []
    updater = updater_with([Engine("http://a", log)], log, pause_mode=None)
    assert updater.update() == 1
    assert log == ["prepare", "send 1", "version"]


def test_an_engine_with_another_version_stops_the_run_and_stays_paused() -> None:
    log: list[str] = []
    updater = updater_with([Engine("http://a", log), Engine("http://b", log, reports="41")], log)
    with pytest.raises(WeightSyncError, match=r"version 1: http://b reports '41'"):
        updater.update()
    assert "continue" not in log
    assert updater.version == 0


@pytest.mark.parametrize("step", ["pause retract", "flush", "continue"])
def test_a_failing_step_names_the_engine_and_the_step(step: str) -> None:
    log: list[str] = []
    updater = updater_with([Engine("http://a", log), Engine("http://b", log, broken=step)], log, "retract")
    with pytest.raises(WeightSyncError, match=rf"(?s){step.split()[0]}.*1 of 2 engines.*http://b.*no {step} today"):
        updater.update()
    assert updater.version == 0


def test_auto_aborts_in_the_synchronous_loop_and_retracts_in_the_overlapped_one() -> None:
    auto = run_args()
    assert resolve_pause_mode(auto, synchronous_loop=True) == "abort"
    assert resolve_pause_mode(auto, synchronous_loop=False) == "retract"


def test_in_place_with_a_prefix_cache_is_refused() -> None:
    args = run_args(weight_sync_pause_mode="in_place")
    with pytest.raises(WeightSyncError, match="--sglang-disable-radix-cache"):
        resolve_pause_mode(args, synchronous_loop=False)
    args.sglang_disable_radix_cache = True
    assert resolve_pause_mode(args, synchronous_loop=False) == "in_place"


class Failing(Transport):
    def send(self, source: Any, *, weight_version: str) -> int:
        self.log.append("send")
        raise WeightSyncError("engine b has gone")


def test_after_a_push_that_failed_the_channels_are_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    engines = {url: Engine(url, log) for url in ("http://a", "http://b")}
    monkeypatch.setattr(updater_module, "EngineClient", lambda url, **_: engines[url])
    args = run_args(weight_sync_timeout=5.0)
    updater = WeightUpdater(args, SimpleNamespace(), Failing(log, []), pause_mode="abort")
    infos = [EngineInfo("http://a"), EngineInfo("http://b")]
    updater.connect(infos)
    updater.connect(infos)
    assert log == ["health", "health", "connect"]  # once
    with pytest.raises(WeightSyncError, match="engine b has gone"):
        updater.update()
    del log[:]
    updater.transport = Transport(log, list(engines.values()))
    updater.connect(infos[:1])
    assert log == ["disconnect", "health", "connect"]
    del log[:]
    assert updater.update() == 1  # the number of the push that failed: its weights are the same
    assert log == ["prepare", "pause abort", "flush", "send 1", "version", "continue"]
    updater.disconnect()
    updater.disconnect()
    assert log.count("disconnect") == 1


def test_an_engine_that_is_gone_is_named_before_any_channel_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    engines = {"http://a": Engine("http://a", log), "http://b": Engine("http://b", log, broken="health")}
    monkeypatch.setattr(updater_module, "EngineClient", lambda url, **_: engines[url])
    args = run_args(weight_sync_timeout=5.0)
    updater = WeightUpdater(args, SimpleNamespace(), Transport(log, []), pause_mode="abort")
    with pytest.raises(WeightSyncError, match=r"(?s)reach the server on 1 of 2 engines.*http://b.*no health today"):
        updater.connect([EngineInfo("http://a"), EngineInfo("http://b")])
    assert "connect" not in log
    updater.connect([EngineInfo("http://a")])
    assert log[-1] == "connect"
