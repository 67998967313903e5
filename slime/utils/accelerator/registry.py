"""Which kinds of device there are, and which one this process uses."""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from slime.utils.accelerator.base import Accelerator
from slime.utils.accelerator.cpu import CpuAccelerator
from slime.utils.accelerator.cuda import CudaAccelerator

ENV = "SLIME_ACCELERATOR"


@dataclass(frozen=True)
class _Kind:
    factory: Callable[[], Accelerator]
    is_available: Callable[[], bool] | None
    priority: int
    communication_backends: tuple[str, ...]

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
    ``communication_backends`` lists the torch.distributed backends that carry its tensors, the preferred one first.
    """
    with _lock:
        _kinds[name] = _Kind(factory, is_available, priority, tuple(communication_backends))


def registered_accelerators() -> dict[str, tuple[str, ...]]:
    """Return the registered names, best first, with their communication backends."""
    with _lock:
        names = sorted(_kinds, key=lambda name: (-_kinds[name].priority, name))
        return {name: _kinds[name].communication_backends for name in names}


def _select() -> Accelerator:
    wanted = os.environ.get(ENV, "").strip()
    if wanted:
        if wanted not in _kinds:
            near = difflib.get_close_matches(wanted, _kinds, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{ENV}={wanted!r} is not a registered accelerator, known: {sorted(_kinds)}.{hint}")
        if not _kinds[wanted].available():
            raise RuntimeError(
                f"{ENV}={wanted!r} was asked for, but this process sees no such device; unset it to let slime choose "
                f"among {sorted(_kinds)}."
            )
        return _kinds[wanted].factory()
    for name in registered_accelerators():
        if _kinds[name].available():
            return _kinds[name].factory()
    raise RuntimeError(f"none of the registered accelerators is available: {sorted(_kinds)}")


def get_accelerator() -> Accelerator:
    """Return the accelerator of this process, choosing it at the first call.

    Raises ValueError for an unknown name in ``SLIME_ACCELERATOR`` and RuntimeError when no device can be used.
    """
    global _current
    with _lock:
        if _current is None:
            _current = _select()
        return _current


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
    """Forget the choice; the next use chooses anew."""
    global _current
    with _lock:
        _current = None


def initialize_accelerator(local_rank: int | None = None) -> Accelerator:
    """Choose the accelerator and prepare this process for it (on CUDA: select the device of ``local_rank``)."""
    accelerator = get_accelerator()
    accelerator.initialize(local_rank)
    return accelerator


register_accelerator("cuda", CudaAccelerator, priority=100, communication_backends=("nccl", "gloo"))
register_accelerator("cpu", CpuAccelerator, priority=0, communication_backends=("gloo",))
