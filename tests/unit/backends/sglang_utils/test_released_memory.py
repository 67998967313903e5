"""Engines can be asked twice to release or to resume their memory, as after a reply that was lost."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.ray.manager.engines.members import MEMORY_TAGS
from tests.support.engine_plugin import engine_plugin


class Registry:
    """SGLang's registry of hooks, which only notes them."""

    def __init__(self) -> None:
        self.hooks: dict[str, Any] = {}

    def register(self, target: str, hook: Any, kind: str) -> None:
        self.hooks[target] = hook


@pytest.fixture
def hooks() -> Iterator[dict[str, Any]]:
    """The plug-in's hooks by target, with stand-ins for what they import of SGLang."""
    registry = Registry()
    contents = {
        "plugins.hook_registry": {
            "HookRegistry": registry,
            "HookType": SimpleNamespace(AROUND="around", AFTER="after"),
        },
        "disaggregation.utils": {"DisaggregationMode": SimpleNamespace(NULL="null")},
        "constants": {"GPU_MEMORY_ALL_TYPES": list(MEMORY_TAGS)},
        "managers.io_struct": {
            "ReleaseMemoryOccupationReqOutput": lambda: "released",
            "ResumeMemoryOccupationReqOutput": lambda: "resumed",
        },
    }
    with engine_plugin(contents) as load:
        load("server.pause").register(on_cpu=False)
        yield registry.hooks


UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


class Engine:
    """A scheduler's work on its tags; ``done`` are the parts it has worked on."""

    def __init__(self, hooks: dict[str, Any]) -> None:
        self.offload_tags: set[str] = set()
        self.done: list[str] = []
        self._hooks = hooks

    def ask(self, what: str, tags: list[str] | None = None) -> str:
        stock = self._release if what == "release" else self._resume
        hook = self._hooks[f"{UPDATER}.{what}_memory_occupation"]
        return str(hook(lambda updater, request: stock(request.tags), self, SimpleNamespace(tags=tags)))

    def _release(self, tags: list[str]) -> str:
        assert not self.offload_tags.intersection(tags), "its weights are read before they are released"
        self.offload_tags.update(tags)
        self.done += tags
        return "released"

    def _resume(self, tags: list[str]) -> str:
        for tag in tags:
            self.offload_tags.remove(tag)  # KeyError, and the end of the scheduler
        self.done += tags
        return "resumed"


def test_the_second_request_does_what_is_left(hooks: dict[str, Any]) -> None:
    engine = Engine(hooks)
    assert engine.ask("release", ["kv_cache"]) == engine.ask("release") == engine.ask("release") == "released"
    assert sorted(engine.done) == sorted(MEMORY_TAGS)
    engine.done.clear()
    assert engine.ask("resume", ["weights"]) == engine.ask("resume") == engine.ask("resume", ["weights"]) == "resumed"
    assert sorted(engine.done) == sorted(MEMORY_TAGS)
    assert engine.offload_tags == set()


def test_the_installed_sglang_has_what_is_hooked() -> None:
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).parent / "srt" / "managers" / "scheduler_components" / "weight_updater.py"
    (manager,) = (
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == UPDATER.rpartition(".")[2]
    )
    methods = {node.name: ast.unparse(node) for node in manager.body if isinstance(node, ast.FunctionDef)}
    assert "self.offload_tags.add(tag)" in methods["release_memory_occupation"]
    assert "self.offload_tags.remove(tag)" in methods["resume_memory_occupation"], "it can be repeated: remove the hook"
