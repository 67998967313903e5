"""Requests that have ended do not keep a scheduler from flushing its cache."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slime.backends.sglang_utils.environment import ENGINE_PLUGIN


@dataclass
class Request:
    ended: bool

    def finished(self) -> bool:
        return self.ended


@dataclass
class Batch:
    reqs: list[Request] = field(default_factory=list)
    batch_is_full: bool = True

    def filter_batch(self) -> None:
        self.reqs = [request for request in self.reqs if not request.finished()]


class Scheduler:
    """As SGLang's: idle without a batch that holds requests."""

    disaggregation_mode = "null"
    _engine_paused = False

    def __init__(self, running: list[bool], last: list[bool] | None, overlap: bool) -> None:
        self.waiting_queue: list[Any] = []
        self.running_batch = Batch([Request(ended) for ended in running])
        self.last_batch = None if last is None else Batch([Request(ended) for ended in last])
        self.enable_overlap = overlap

    def flush_cache(self) -> bool:
        return not self.running_batch.reqs and not (self.last_batch and self.last_batch.reqs)


@pytest.fixture
def pause(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hooks, without SGLang."""
    registry, utils = (ModuleType(f"sglang.srt.{name}") for name in ("plugins.hook_registry", "disaggregation.utils"))
    vars(registry).update(HookRegistry=None, HookType=None)
    vars(utils).update(DisaggregationMode=SimpleNamespace(NULL="null"))
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.disaggregation"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (registry, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("slime_engine_plugin", "slime_engine_plugin.server.pause"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(ENGINE_PLUGIN))
    return importlib.import_module("slime_engine_plugin.server.pause")


@pytest.mark.parametrize(
    ("running", "last", "overlap", "flushes"),
    [
        ([], None, False, True),
        ([], [True, True], False, True),  # a prefill that ended its requests
        ([True], None, False, True),
        ([True], [True], False, True),
        ([], [True, False], False, False),
        ([True, False], None, False, False),
        ([False], [True], False, False),
        ([], [True], True, False),  # it may run meanwhile
    ],
)
def test_requests_that_have_ended_do_not_keep_the_cache(
    pause: Any, running: list[bool], last: list[bool] | None, overlap: bool, flushes: bool
) -> None:
    scheduler = Scheduler(running, last, overlap)
    assert pause.flush_with_waiting_requests(Scheduler.flush_cache, scheduler) is flushes
    kept = [request for batch in (scheduler.running_batch, scheduler.last_batch) if batch for request in batch.reqs]
    if flushes:
        assert kept == []
        assert scheduler.running_batch.batch_is_full == (not running and not last)
    else:
        whole = [running, last or []]
        assert len(kept) == sum(len(batch) for batch in whole if overlap or not all(batch))
