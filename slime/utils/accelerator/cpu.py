"""The CPU as an accelerator: one device, always current, nothing to wait for."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path
from typing import Any

from slime.utils.accelerator.base import Accelerator


def _status_bytes(field: str) -> int | None:
    """Return a ``VmRSS``-like entry of this process's ``/proc`` status in bytes, None where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


def _peak_rss() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _available_pages() -> int:
    """Return the bytes the system can still give out, by /proc's estimate (free pages where there is none)."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # no /proc: the next line is the portable, pessimistic answer
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


class CpuAccelerator(Accelerator):
    """Tensors live in host memory, ranks talk over gloo."""

    device_type = "cpu"
    communication_backend = "gloo"

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def set_device(self, index: int) -> None:
        """Accept any index: every local rank of a CPU run shares the one device."""

    def synchronize(self) -> None:
        """Do nothing: CPU operations have finished when they return."""

    def empty_cache(self) -> None:
        """Collect garbage and ask glibc to return freed arenas to the system."""
        gc.collect()
        if sys.platform == "linux":
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)

    def memory_stats(self) -> dict[str, int]:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = _available_pages()
        rss = _status_bytes("VmRSS") or _peak_rss()
        return {"total": total, "free": free, "used": total - free, "allocated": rss, "reserved": rss}
