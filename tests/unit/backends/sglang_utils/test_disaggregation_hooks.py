"""A prefill or decode engine on a CPU that waits for another one's caches leaves it the cores."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slime.backends.sglang_utils.environment import ENGINE_PLUGIN


@pytest.mark.parametrize(
    ("sleeps_on_idle", "has_requests", "polled"), [(True, True, 1), (True, False, 0), (False, True, 0)]
)
def test_it_polls_with_a_pause_while_requests_wait(
    monkeypatch: pytest.MonkeyPatch, sleeps_on_idle: bool, has_requests: bool, polled: int
) -> None:
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    vars(registry).update(HookRegistry=None, HookType=None)
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    for name in ("slime_engine_plugin", "slime_engine_plugin.cpu.disaggregation"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(ENGINE_PLUGIN))
    hooks: Any = importlib.import_module("slime_engine_plugin.cpu.disaggregation")
    timeouts: list[int] = []
    sleeper = SimpleNamespace(poller=SimpleNamespace(poll=timeouts.append)) if sleeps_on_idle else None
    hooks.wait_for_caches(None, SimpleNamespace(idle_sleeper=sleeper, is_fully_idle=lambda: not has_requests))
    assert timeouts == [hooks.POLL_MS] * polled
    for name in ("slime_engine_plugin", "slime_engine_plugin.cpu.disaggregation"):
        sys.modules.pop(name, None)
