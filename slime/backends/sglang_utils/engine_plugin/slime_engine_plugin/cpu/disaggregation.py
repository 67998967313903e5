"""Prefill and decode engines on a CPU, whose key-value caches are in host memory.

SGLang registers the caches with nixl as memory of a GPU, which nixl refuses of memory that is none.

With ``--sleep-on-idle`` one that has requests but no batch looks for their caches every millisecond: a stock scheduler
polls without a break, and takes the cores from the engine that computes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

POLL_MS = 1


def in_host_memory(normalize: Callable[..., list[str]], kinds: object, expected_len: int) -> list[str]:
    """Around ``_normalize_kv_mem_kinds``: all of it is, also where SGLang says otherwise."""
    return normalize(["DRAM"] * expected_len, expected_len)


def wait_for_caches(result: None, scheduler: Scheduler) -> None:
    """Wait for a request, at most ``POLL_MS``, after ``Scheduler.on_idle``, which sleeps only without requests."""
    if scheduler.idle_sleeper is not None and not scheduler.is_fully_idle():
        scheduler.idle_sleeper.poller.poll(POLL_MS)


def register() -> None:
    """Register the hooks where caches are carried at all: applying them imports SGLang's half of nixl."""
    if not any(word.startswith("--disaggregation-mode") for word in sys.argv):
        return
    HookRegistry.register(
        "sglang.srt.disaggregation.nixl.conn._normalize_kv_mem_kinds", in_host_memory, HookType.AROUND
    )
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.on_idle", wait_for_caches, HookType.AFTER)
