"""Two hooks on the start of an engine.

SGLang spawns its scheduler and detokenizer, and each imports everything again: two thirds of the start-up time of a
small engine. CUDA forbids forking; without it the children can share what the parent has imported. At that point the
parent has started neither its event loop nor ZeroMQ, so there is no thread that a child could miss.

With ``--skip-server-warmup`` SGLang sends itself a request (freeze the garbage collector) before its HTTP server
listens. Most often that fails and leaves fifty lines of traceback where the last lines of the log should be.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

LISTEN_DEADLINE_S = 60.0


def fork_workers(result: object, *args: object, **kwargs: object) -> None:
    """After ``_set_envs_and_config``, which asks for spawn."""
    multiprocessing.set_start_method("fork", force=True)


def wait_for_listener(server_args: ServerArgs) -> None:
    """Before ``_freeze_gc_after_server_warmup``: return when the server accepts connections, or at the deadline."""
    deadline = time.monotonic() + LISTEN_DEADLINE_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection((server_args.host, server_args.port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.05)


def register(on_cpu: bool) -> None:
    """Register the hooks."""
    if on_cpu:
        HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", fork_workers, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.entrypoints.http_server._freeze_gc_after_server_warmup", wait_for_listener, HookType.BEFORE
    )
