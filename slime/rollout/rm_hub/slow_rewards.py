"""Names rewards that take long, with their sample and where they are, long before their deadline."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

SLOW_S = 30.0
"""A reward that takes longer is named, and then at most one message per such a time is written."""


@dataclass(frozen=True)
class _Reward:
    began: float
    limit_s: float
    indices: Sequence[int | None]
    name: str
    function: Callable[..., Any] | None
    event_loop: int  # the thread it is awaited in


class SlowRewards:
    """Watches rewards under way from a thread of its own: one that blocks the event loop cannot block that."""

    def __init__(self, slow_s: float | None = None) -> None:
        self._slow_s = slow_s
        self._under_way: dict[int, _Reward] = {}
        self._lock = threading.Lock()
        self._watcher: threading.Thread | None = None

    @contextlib.contextmanager
    def watching(
        self, indices: Sequence[int | None], limit_s: float, name: str, function: Callable[..., Any] | None
    ) -> Iterator[None]:
        """Within the block the reward ``name`` of the samples ``indices`` is under way, for ``limit_s`` at most."""
        reward = _Reward(time.monotonic(), limit_s, indices, name, function, threading.get_ident())
        with self._lock:
            self._under_way[id(reward)] = reward
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="slow-rewards", daemon=True)
                self._watcher.start()
        try:
            yield
        finally:
            with self._lock:
                del self._under_way[id(reward)]

    def _watch(self) -> None:
        slow_s = SLOW_S if self._slow_s is None else self._slow_s
        while True:
            time.sleep(slow_s / 10)
            with self._lock:
                if not self._under_way:
                    self._watcher = None
                    return
                slow = [r for r in self._under_way.values() if time.monotonic() - r.began >= slow_s]
            if slow:
                logger.warning("%s", _sentence(min(slow, key=lambda reward: reward.began), len(slow)))
                time.sleep(slow_s)


def _sentence(reward: _Reward, count: int) -> str:
    more = f", and {count - 1} more are as slow" if count > 1 else ""
    place, blocks = _whereabouts(reward)
    end = (
        "it blocks the event loop, where no deadline can end it: await what it waits for, or make it a plain function, "
        "which gets a thread of its own"
        if blocks
        else f"it times out after {reward.limit_s:g} s (--reward-timeout)"
    )
    return (
        f"the reward of samples {list(reward.indices)} ({reward.name}) has been pending for "
        f"{time.monotonic() - reward.began:.0f} s{place}{more}; {end}"
    )


def _whereabouts(reward: _Reward) -> tuple[str, bool]:
    """Where the function is being run, if it is (one that awaits something is in no thread), and whether it blocks."""
    code = getattr(reward.function, "__code__", None)
    for thread, innermost in sys._current_frames().items():
        frame: FrameType | None = innermost
        while frame is not None and code is not None:
            if frame.f_code is code:
                return f", at {frame.f_code.co_filename}:{frame.f_lineno}", thread == reward.event_loop
            frame = frame.f_back
    return "", False
