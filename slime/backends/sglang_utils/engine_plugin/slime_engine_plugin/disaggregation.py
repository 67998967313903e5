"""Prefill and decode engines on a CPU, whose key-value caches are in host memory.

SGLang registers the caches with nixl as memory of a GPU, which nixl refuses of memory that is none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def in_host_memory(normalize: Callable[..., list[str]], kinds: Any, expected_len: int) -> list[str]:
    """Around ``_normalize_kv_mem_kinds``: all of it is, whatever SGLang says."""
    return normalize(["DRAM"] * expected_len, expected_len)


def register() -> None:
    """Register the hook where caches are carried at all: applying it imports SGLang's half of nixl."""
    if not any(word.startswith("--disaggregation-mode") for word in sys.argv):
        return
    HookRegistry.register(
        "sglang.srt.disaggregation.nixl.conn._normalize_kv_mem_kinds", in_host_memory, HookType.AROUND
    )
