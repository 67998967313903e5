"""The connections that a client has on one event loop, and that end with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import aiohttp

CONTROL_CONNECTIONS = 100
CONNECT_DEADLINE_S = 30


class ConnectionPools:
    """At most ``concurrency`` connections to each server for long answers, and a few for short ones.

    It belongs to the running loop. Servers do not share connections: a tool that is asked while every engine is busy
    would have to wait for one of their answers.

    Attributes:
        turns: as many as there are connections to one server for long answers.
    """

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.turns = asyncio.Semaphore(concurrency)
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        self._end: AsyncGenerator[None, None] | None = None

    async def session(self, *, short: bool) -> aiohttp.ClientSession:
        """Return the session for a short or a long answer."""
        if self._end is None:
            self._end = self._closed_in_the_end()
            await anext(self._end)
        found = self._sessions.get(short)
        if found is None or found.closed:
            found = self._sessions[short] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=CONTROL_CONNECTIONS if short else 0, limit_per_host=0 if short else self.concurrency
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_DEADLINE_S),
                trust_env=False,
            )
        return found

    async def close(self) -> None:
        """Close every connection."""
        if self._end is not None:
            await self._end.aclose()

    async def _closed_in_the_end(self) -> AsyncGenerator[None, None]:
        """Close the sessions when the loop ends: ``asyncio.run`` closes the generators that began on its loop, and
        once it is over nothing can close a connection properly."""
        try:
            yield
        finally:
            for session in self._sessions.values():
                await session.close()
