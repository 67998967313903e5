"""The turns of each session that are being answered; another thread can wait for them or cut them off."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

CUT_OFF_DEADLINE_S = 10.0
"""For a turn that was cut off to end."""


class Turn:
    """One turn being answered, on the event loop of the application."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.done: Future[None] = Future()
        self.is_cut_off = False
        self.generation: asyncio.Task[Any] | None = None

    def cut_off(self) -> None:
        """Cancel its generation, or let none begin. From any thread."""
        self.is_cut_off = True
        with contextlib.suppress(RuntimeError):  # the application has ended, and its requests with it
            self.loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self.generation is not None:
            self.generation.cancel()


class InFlight:
    """The turns in flight by session id. Thread-safe."""

    def __init__(self) -> None:
        self._turns: dict[str, list[Turn]] = {}
        self._lock = threading.Lock()

    def count(self, sid: str) -> int:
        """Return the number of turns of ``sid`` that are being answered."""
        return len(self._turns.get(sid, ()))

    @contextlib.contextmanager
    def turn(self, sid: str) -> Iterator[Turn]:
        """Hold a turn of ``sid`` in flight for the length of the block."""
        turn = Turn()
        with self._lock:
            self._turns.setdefault(sid, []).append(turn)
        try:
            yield turn
        finally:
            with self._lock:
                self._turns[sid].remove(turn)
                if not self._turns[sid]:
                    del self._turns[sid]
            turn.done.set_result(None)

    async def drain(self, sid: str, timeout: float) -> bool:
        """Wait for the turns of ``sid``, cutting off those that take longer than ``timeout`` s.

        Returns False when one has not ended even then.
        """
        with self._lock:
            turns = list(self._turns.get(sid, ()))
        if not turns:
            return True
        # shielded, because a cancelled wait must not cancel what it waits for
        ends = {asyncio.shield(asyncio.wrap_future(turn.done)) for turn in turns}
        _, late = await asyncio.wait(ends, timeout=timeout)
        if late:
            for turn in turns:
                turn.cut_off()
            _, late = await asyncio.wait(late, timeout=CUT_OFF_DEADLINE_S)
        for end in late:
            end.cancel()
        return not late
