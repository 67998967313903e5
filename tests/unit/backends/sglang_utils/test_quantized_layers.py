"""SGLang may name any argument of a method that a hook for quantized layers replaces."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slime.backends.sglang_utils.environment import ENGINE_PLUGIN


def test_hooks_have_the_parameters_of_what_they_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    expected: dict[str, list[str]] = {}
    hooks: dict[str, Callable[..., Any]] = {}
    registry: Any = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry = SimpleNamespace(register=lambda target, hook, kind: hooks.update({target: hook}))
    registry.HookType = SimpleNamespace(REPLACE="replace")
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.syspath_prepend(str(ENGINE_PLUGIN))
    quantized = importlib.import_module("slime_engine_plugin.cpu.quantized")
    note = expected.__setitem__
    monkeypatch.setattr(quantized, "require", lambda target, parameters: note(target, parameters.split()))
    quantized.register()
    for name in [name for name in sys.modules if name.startswith("slime_engine_plugin")]:
        del sys.modules[name]
    assert len(expected) == 10
    for target, parameters in expected.items():  # self has another name in a function outside of a class
        assert list(inspect.signature(hooks[target]).parameters)[1:] == parameters[1:], target
