"""A router over stand-in engines."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import aiohttp

from tests.support.standin.engine import StandInEngine
from tests.support.standin.wire import Request, Response


@dataclass
class StandInRouter:
    """Forwards ``/generate`` in turn, lists ``/workers``, and forwards nothing else.

    A request whose engine breaks the connection is answered 502, one without engines 503.
    """

    engines: list[StandInEngine]
    url: str = ""
    turn: int = 0

    async def handle(self, request: Request) -> Response:
        """Answer one request."""
        path = request.path.partition("?")[0]
        if path == "/workers":
            return Response.of_json({"workers": [{"id": str(i), "url": e.url} for i, e in enumerate(self.engines)]})
        if path != "/generate":
            return Response.of_json({"detail": "Not Found"}, 404)
        if not self.engines:
            return Response.of_json({"error": {"code": "no_available_workers"}}, 503)
        self.turn += 1
        engine = self.engines[self.turn % len(self.engines)]
        headers = {name: value for name, value in request.headers.items() if name.lower().startswith("x-")}
        headers["Content-Type"] = "application/json"
        async with contextlib.AsyncExitStack() as opened:
            try:
                session = await opened.enter_async_context(
                    aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
                )
                asked = session.post(f"{engine.url}/generate", data=request.body, headers=headers)
                reply = await opened.enter_async_context(asked)
                if reply.content_type == "text/event-stream":
                    pieces = _forward(reply, opened.pop_all())
                    return Response(reply.status, content_type=reply.content_type, pieces=pieces)
                return Response(reply.status, await reply.read(), reply.content_type)
            except aiohttp.ClientError as e:
                return Response.of_json({"error": {"message": str(e)}}, 502)


async def _forward(reply: aiohttp.ClientResponse, opened: contextlib.AsyncExitStack) -> AsyncGenerator[bytes, None]:
    async with opened:
        try:
            async for piece in reply.content.iter_any():
                yield piece
        except aiohttp.ClientError as e:
            raise ConnectionError(str(e)) from e
