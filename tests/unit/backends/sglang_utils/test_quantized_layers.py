"""SGLang may name any argument of a method that a hook for quantized layers replaces."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engine_plugin import engine_plugin


def test_hooks_have_the_parameters_of_what_they_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    expected: dict[str, list[str]] = {}
    hooks: dict[str, Callable[..., Any]] = {}
    registry = SimpleNamespace(register=lambda target, hook, kind: hooks.update({target: hook}))
    fakes = {"plugins.hook_registry": {"HookRegistry": registry, "HookType": SimpleNamespace(REPLACE="replace")}}
    with engine_plugin(fakes) as load:
        quantized = load("cpu.quantized")
        note = expected.__setitem__
        monkeypatch.setattr(quantized, "require", lambda target, parameters: note(target, parameters.split()))
        quantized.register()
    assert len(expected) == 10
    for target, parameters in expected.items():  # self has another name in a function outside of a class
        assert list(inspect.signature(hooks[target]).parameters)[1:] == parameters[1:], target
