"""Start an engine's worker processes by fork on a machine without CUDA.

SGLang spawns its scheduler and detokenizer, and each imports everything again: two thirds of the start-up time of a
small engine. CUDA forbids forking; without it the children can share what the parent has imported. At that point the
parent has started neither its event loop nor ZeroMQ, so there is no thread that a child could miss.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def fork_workers(result: Any, *args: Any, **kwargs: Any) -> None:
    """After ``_set_envs_and_config``, which asks for spawn."""
    multiprocessing.set_start_method("fork", force=True)


def register() -> None:
    """Register the hook."""
    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", fork_workers, HookType.AFTER)
