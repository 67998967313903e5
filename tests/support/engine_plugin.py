"""Import modules of the engines' plug-in without SGLang."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from slime.backends.sglang_utils.environment import ENGINE_PLUGIN

PACKAGE = "slime_engine_plugin"
REGISTRY = {"plugins.hook_registry": {"HookRegistry": None, "HookType": None}}


@contextmanager
def engine_plugin(sglang: Mapping[str, ModuleType | Mapping[str, Any]] | None = None) -> Iterator[Callable[[str], Any]]:
    """Yield an importer of the plug-in's modules, ``load("server.pause")``.

    ``sglang`` are the modules below ``sglang.srt`` that they import, ``{"layers.sampler": {"Sampler": Sampler}}``;
    hooks are only registered where it has a registry. Modules that were loaded before are back afterwards.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("sglang", PACKAGE)]:
            patch.delitem(sys.modules, name)
        for name, content in {**REGISTRY, **(sglang or {})}.items():
            full = f"sglang.srt.{name}"
            module = content if isinstance(content, ModuleType) else ModuleType(full)
            if module is not content:
                vars(module).update(content)
            patch.setitem(sys.modules, full, module)
            while "." in full:
                full, _, child = full.rpartition(".")
                if full not in sys.modules:
                    patch.setitem(sys.modules, full, ModuleType(full))
                vars(sys.modules[full])[child] = sys.modules[f"{full}.{child}"]
        patch.syspath_prepend(str(ENGINE_PLUGIN))
        yield lambda name: importlib.import_module(f"{PACKAGE}.{name}")
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
