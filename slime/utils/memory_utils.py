"""Memory of the current device: cached blocks, and how much is free."""

from __future__ import annotations

import gc
import logging
import sys

from slime.utils import accelerator

logger = logging.getLogger(__name__)
_GB = 2**30


def clear_memory(clear_host_memory: bool = False) -> None:
    """Collect garbage and give cached blocks of the device back; with ``clear_host_memory`` pinned host blocks too."""
    accelerator.synchronize()
    gc.collect()
    accelerator.empty_cache()
    torch = sys.modules.get("torch")
    if clear_host_memory and torch is not None and accelerator.device_type() == "cuda":
        torch._C._host_emptyCache()


def available_memory() -> dict[str, str | float]:
    """Return the device under ``gpu``, and GiB under ``total_GB, free_GB, used_GB, allocated_GB, reserved_GB``."""
    stats = accelerator.memory_stats()
    sizes = {f"{name}_GB": round(stats[name] / _GB, 2) for name in ("total", "free", "used", "allocated", "reserved")}
    return {"gpu": str(accelerator.current_device()), **sizes}


def print_memory(msg: str, clear_before_print: bool = False) -> dict[str, str | float]:
    """Log :func:`available_memory` after ``msg`` and return it."""
    if clear_before_print:
        clear_memory()
    found = available_memory()
    logger.info("memory %s: %s", msg, found)
    return found
