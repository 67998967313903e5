"""A tensor-parallel group made of threads: every rank runs the same function, an exchange meets at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

_DEADLINE_S = 30.0


class ThreadGroup:
    """Rank ``rank`` of ``len(slots)`` threads that share ``slots`` and ``barrier``."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self._rank, self._slots, self._barrier = rank, slots, barrier

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._slots)

    def exchange(self, value: Tensor) -> list[Tensor]:
        """Return what every rank passed, in rank order."""
        self._slots[self._rank] = value.detach().clone()
        self._barrier.wait(_DEADLINE_S)
        values = list(self._slots)
        self._barrier.wait(_DEADLINE_S)
        return values


def run_ranks(size: int, function: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Call ``function(group)`` once per rank in threads; results in rank order, the first error raised."""
    slots: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def call(rank: int) -> Any:
        try:
            return function(ThreadGroup(rank, slots, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(call, rank) for rank in range(size)]]
