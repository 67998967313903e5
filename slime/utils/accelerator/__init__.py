"""The one place that knows what a device is: ``device_type()``, ``current_device()``, ``synchronize()``, ...

CUDA and CPU are built in; :func:`register_accelerator` adds a kind of device. ``SLIME_ACCELERATOR`` selects one;
without it the available one of highest priority is taken. Importing this module does not import torch.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "Accelerator",
    "communication_backend",
    "current_device",
    "device_type",
    "empty_cache",
    "get_accelerator",
    "initialize_accelerator",
    "memory_stats",
    "register_accelerator",
    "reset_accelerator",
    "set_accelerator",
    "set_device",
    "synchronize",
]

ENV = "SLIME_ACCELERATOR"


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


@dataclass(frozen=True)
class _Kind:
    factory: Callable[[], Accelerator]
    is_available: Callable[[], bool] | None
    priority: int

    def available(self) -> bool:
        return self.is_available() if self.is_available is not None else self.factory().is_available()


_kinds: dict[str, _Kind] = {}
_current: Accelerator | None = None
_lock = threading.RLock()


def register_accelerator(
    name: str,
    factory: Callable[[], Accelerator],
    is_available: Callable[[], bool] | None = None,
    priority: int = 0,
    communication_backends: tuple[str, ...] = (),
) -> None:
    """Add a kind of device (or replace the one called ``name``).

    ``is_available`` answers without building the accelerator whether it can be used here (default: ask the built
    one). Among the available kinds the one of highest ``priority`` is chosen; CUDA has 100, the CPU 0.
    ``communication_backends`` is part of the public signature; the accelerator's own attribute decides.
    """
    del communication_backends
    with _lock:
        _kinds[name] = _Kind(factory, is_available, priority)


def get_accelerator() -> Accelerator:
    """Return the accelerator of this process, choosing it at the first call.

    Raises ValueError for an unknown name in ``SLIME_ACCELERATOR`` and RuntimeError when no device can be used.
    """
    global _current
    with _lock:
        if _current is None:
            _current = _select()
        return _current


def _select() -> Accelerator:
    wanted = os.environ.get(ENV, "").strip()
    if wanted:
        if wanted not in _kinds:
            raise ValueError(f"{ENV}={wanted!r} is not a registered accelerator, known: {sorted(_kinds)}")
        if not _kinds[wanted].available():
            raise RuntimeError(
                f"{ENV}={wanted!r} was asked for, but this process sees no such device; unset it to let slime choose "
                f"among {sorted(_kinds)}."
            )
        return _kinds[wanted].factory()
    for kind in sorted(_kinds.values(), key=lambda kind: -kind.priority):
        if kind.available():
            return kind.factory()
    raise RuntimeError(f"none of the registered accelerators is available: {sorted(_kinds)}")


def set_accelerator(accelerator: Accelerator | str) -> Accelerator:
    """Use ``accelerator`` (an instance, or a registered name) from now on; return it."""
    global _current
    with _lock:
        if isinstance(accelerator, str):
            if accelerator not in _kinds:
                raise ValueError(f"accelerator {accelerator!r} is not registered, known: {sorted(_kinds)}")
            accelerator = _kinds[accelerator].factory()
        _current = accelerator
        return accelerator


def reset_accelerator() -> None:
    """Forget the choice; the next use selects again."""
    global _current
    with _lock:
        _current = None


def initialize_accelerator(local_rank: int | None = None) -> Accelerator:
    """Choose the accelerator and prepare this process for it (on CUDA: select the device of ``local_rank``)."""
    accelerator = get_accelerator()
    accelerator.initialize(local_rank)
    return accelerator


def device_type() -> str:
    """Return the torch device type, such as ``"cpu"`` or ``"cuda"``."""
    return get_accelerator().device_type


def communication_backend() -> str:
    """Return the torch.distributed backend for tensors of the device, such as ``"gloo"`` or ``"nccl"``."""
    return get_accelerator().communication_backend


def current_device() -> Any:
    """Return the ``torch.device`` on which new tensors of this process belong."""
    return get_accelerator().current_device()


def set_device(index: int) -> None:
    """Make device ``index`` the current one (nothing to do on a CPU)."""
    get_accelerator().set_device(index)


def synchronize() -> None:
    """Wait until all work queued on the current device is done."""
    get_accelerator().synchronize()


def empty_cache() -> None:
    """Give memory that is cached but unused back to the device or the system."""
    get_accelerator().empty_cache()


def memory_stats() -> dict[str, int]:
    """Return ``total, free, used, allocated, reserved`` in bytes; on a CPU the last two are this process's RSS."""
    return get_accelerator().memory_stats()


register_accelerator("cuda", CudaAccelerator, priority=100)
register_accelerator("cpu", CpuAccelerator)
