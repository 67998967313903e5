"""An event loop whose clock jumps to the next timer instead of waiting for it: hours of simulation in seconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: what it would have waited is added to ``now``."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise RuntimeError("every task waits for another one")
            self.now += max(0.0, timeout)
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """``time()`` is virtual; ``asyncio.sleep`` returns at once in real time."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(coro: Coroutine[Any, Any, T]) -> T:
    """Run ``coro`` on a fresh loop; assert that it leaves no task behind."""
    loop = VirtualTimeLoop()
    try:
        result = loop.run_until_complete(coro)
        left = asyncio.all_tasks(loop)
        assert not left, f"tasks left: {left}"
        return result
    finally:
        loop.close()
