"""A turn's answer as server-sent events. The whole turn is generated first; until then the stream is kept alive."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import web

from slime.agent.adapters.http_requests import ClientGone
from slime.agent.adapters.provider import ParsedRequest, ProviderFormat

OPEN_AFTER_S = 1.0
"""Until then a turn that fails is answered with an HTTP status, which clients understand better than an event."""
KEEP_ALIVE_S = 10.0


def wants_stream(request: web.Request, body: Mapping[str, Any]) -> bool:
    """Return True if the client asks for events."""
    return body.get("stream") is True or "text/event-stream" in request.headers.get("Accept", "")


class EventStream:
    """The stream of one turn. It opens when the turn takes longer than ``OPEN_AFTER_S``, or with the answer."""

    def __init__(self, request: web.Request, api: ProviderFormat, asked: ParsedRequest) -> None:
        self.request, self.api, self.asked = request, api, asked
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        self._due = time.monotonic() + OPEN_AFTER_S

    @property
    def is_open(self) -> bool:
        """True if the headers are sent, so that no other answer is possible."""
        return self.response.prepared

    async def keep_alive(self) -> None:
        """Send what is due. To be called all along. Raises ClientGone."""
        if time.monotonic() < self._due:
            return
        await (self._write(self.api.keep_alive(self.asked)) if self.is_open else self._open())
        self._due = time.monotonic() + KEEP_ALIVE_S

    async def end(self, events: Iterable[bytes]) -> web.StreamResponse:
        """Send the last events. A client that is gone by then gets nothing more: the headers may be sent already."""
        with contextlib.suppress(ClientGone, ConnectionError):
            if not self.is_open:
                await self._open()
            await self._write(b"".join(events))
            await self.response.write_eof()
        return self.response

    async def _open(self) -> None:
        await self.response.prepare(self.request)
        await self._write(b"".join(self.api.opening_events(self.asked)))

    async def _write(self, data: bytes) -> None:
        try:
            await self.response.write(data)
        except ConnectionError as e:
            raise ClientGone from e


def event(kind: str, **fields: object) -> bytes:
    """An event with a name, which its data have as ``type`` too."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
