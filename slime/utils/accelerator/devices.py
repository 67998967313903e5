"""The kinds of devices: what each has to offer, NVIDIA GPUs through torch.cuda, and the CPU."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any


class Accelerator(ABC):
    """One kind of device. Subclass it and hand a factory to ``register_accelerator`` to add a kind."""

    device_type: str
    communication_backend: str

    @abstractmethod
    def is_available(self) -> bool:
        """Return whether this process can use such a device."""

    @abstractmethod
    def current_device(self) -> Any:
        """Return the current ``torch.device``."""

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Make device ``index`` the current one."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all queued work."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Release cached memory."""

    @abstractmethod
    def memory_stats(self) -> dict[str, int]:
        """Return ``total, free, used, allocated, reserved`` in bytes."""

    def initialize(self, local_rank: int | None = None) -> None:
        """Prepare the process: choose the device of ``local_rank`` when one is given."""
        if local_rank is not None:
            self.set_device(local_rank)


class CudaAccelerator(Accelerator):
    """Tensors live on the current CUDA device, ranks talk over NCCL."""

    device_type = "cuda"
    communication_backend = "nccl"

    def is_available(self) -> bool:
        import torch

        return torch.cuda.is_available()

    def current_device(self) -> Any:
        import torch

        return torch.device("cuda", torch.cuda.current_device())

    def set_device(self, index: int) -> None:
        """Raise ValueError, with the number of visible devices, when there is no device ``index``."""
        import torch

        count = torch.cuda.device_count()
        if not 0 <= index < count:
            raise ValueError(
                f"device {index} does not exist: this process sees {count} CUDA device(s). "
                "Check LOCAL_RANK and CUDA_VISIBLE_DEVICES."
            )
        torch.cuda.set_device(index)

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        import torch

        gc.collect()
        torch.cuda.empty_cache()

    def memory_stats(self) -> dict[str, int]:
        import torch

        free, total = torch.cuda.mem_get_info()
        return {
            "total": total,
            "free": free,
            "used": total - free,
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }


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
    """Tensors live in host memory, ranks talk over gloo: one device, always current, nothing to wait for."""

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
        rss = _status_bytes("VmRSS")
        if not rss:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            rss = peak if sys.platform == "darwin" else peak * 1024
        return {"total": total, "free": free, "used": total - free, "allocated": rss, "reserved": rss}
