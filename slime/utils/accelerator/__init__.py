"""The one place that knows what a device is.

Everything else in slime asks this module: ``device_type()``, ``current_device()``, ``synchronize()``, ... CUDA and CPU
are built in; further kinds are added with :func:`register_accelerator`. The environment variable
``SLIME_ACCELERATOR`` names the one to use; without it the available one of highest priority is taken. Importing this
module does not import torch.
"""

from __future__ import annotations

from typing import Any

from slime.utils.accelerator.base import Accelerator
from slime.utils.accelerator.registry import (
    get_accelerator,
    initialize_accelerator,
    register_accelerator,
    registered_accelerators,
    reset_accelerator,
    set_accelerator,
)

__all__ = [
    "Accelerator",
    "communication_backend",
    "current_device",
    "device_count",
    "device_type",
    "empty_cache",
    "get_accelerator",
    "initialize_accelerator",
    "is_available",
    "manual_seed",
    "max_memory_allocated",
    "memory_stats",
    "register_accelerator",
    "registered_accelerators",
    "reset_accelerator",
    "reset_peak_memory_stats",
    "set_accelerator",
    "set_device",
    "synchronize",
]


def device_type() -> str:
    """Return the torch device type, such as ``"cpu"`` or ``"cuda"``."""
    return get_accelerator().device_type


def communication_backend() -> str:
    """Return the torch.distributed backend for tensors of the device, such as ``"gloo"`` or ``"nccl"``."""
    return get_accelerator().communication_backend


def is_available() -> bool:
    """Return whether the selected accelerator can be used in this process."""
    return get_accelerator().is_available()


def device_count() -> int:
    """Return how many devices this process sees (a CPU counts as one)."""
    return get_accelerator().device_count()


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


def manual_seed(seed: int) -> None:
    """Seed the device's default random generator."""
    get_accelerator().manual_seed(seed)


def memory_stats() -> dict[str, int]:
    """Return ``total, free, used, allocated, reserved`` in bytes; on a CPU the last two are this process's RSS."""
    return get_accelerator().memory_stats()


def max_memory_allocated() -> int:
    """Return the peak of the memory allocated by this process, in bytes, since the last reset."""
    return get_accelerator().max_memory_allocated()


def reset_peak_memory_stats() -> None:
    """Start a new measurement for :func:`max_memory_allocated`."""
    get_accelerator().reset_peak_memory_stats()
