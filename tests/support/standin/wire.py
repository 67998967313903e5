"""The least of HTTP/1.1 that a stand-in needs: thousands of requests a second from one process.

One request at a time per connection, bodies with a Content-Length, connections kept alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus

import orjson

REASONS = {int(status): status.phrase for status in HTTPStatus}


@dataclass
class Request:
    """One request; ``headers`` by lower-case name, ``lost`` is set when its client has gone."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    lost: asyncio.Event


@dataclass
class Response:
    """A reply. Of its ``body`` only ``sent`` bytes are sent before the connection is cut, when that is given.

    ``pieces`` of a body are sent as they come instead; one that raises ConnectionError cuts the connection.
    """

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    sent: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    pieces: AsyncGenerator[bytes, None] | None = None

    @classmethod
    def of_json(cls, value: object, status: int = 200) -> Response:
        return cls(status, orjson.dumps(value))

    def encode(self) -> bytes:
        extra = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        size = "Transfer-Encoding: chunked" if self.pieces is not None else f"Content-Length: {len(self.body)}"
        head = (
            f"HTTP/1.1 {self.status} {REASONS.get(self.status, 'Unknown')}\r\nContent-Type: {self.content_type}\r\n"
            f"{size}\r\n{extra}\r\n"
        )
        return head.encode() + self.body


Handler = Callable[[Request], Awaitable[Response | None]]
"""Answers a request; None cuts the connection without a word."""


class Connection(asyncio.Protocol):
    """One connection: reads a request, lets the handler answer it, reads the next."""

    def __init__(self, handler: Handler, open_connections: set[Connection]) -> None:
        self.handler = handler
        self.open_connections = open_connections
        self.transport: asyncio.Transport | None = None
        self.buffer = bytearray()
        self.task: asyncio.Task[None] | None = None
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.open_connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        self.open_connections.discard(self)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self._take_request()

    def _take_request(self) -> None:
        end = self.buffer.find(b"\r\n\r\n")
        if self.task is not None or end < 0:
            return
        if self.buffer.startswith(b"PRI "):  # a router that tries HTTP/2 first
            assert self.transport is not None
            self.transport.close()
            return
        first, *lines = self.buffer[:end].decode("latin-1").split("\r\n")
        headers = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        size = next((int(value) for name, value in headers.items() if name.lower() == "content-length"), 0)
        if len(self.buffer) < end + 4 + size:
            return
        method, path, _ = first.split(" ", 2)
        body = bytes(self.buffer[end + 4 : end + 4 + size])
        del self.buffer[: end + 4 + size]
        request = Request(method, path, headers, body, self.lost)
        self.task = asyncio.get_running_loop().create_task(self._answer(request))

    async def _answer(self, request: Request) -> None:
        assert self.transport is not None
        try:
            response = await self.handler(request)
        except Exception:
            self.transport.abort()  # a client must not wait for the answer of a handler that failed
            raise
        if response is None:
            self.transport.abort()
            return
        data = response.encode()
        if response.sent is not None:
            self.transport.write(data[: len(data) - len(response.body) + response.sent])
            self.transport.close()
            return
        self.transport.write(data)
        if response.pieces is not None and not await self._send_pieces(response.pieces):
            self.transport.abort()
            return
        self.task = None
        self._take_request()

    async def _send_pieces(self, pieces: AsyncGenerator[bytes, None]) -> bool:
        """Send a body in pieces; False when it broke off or its reader has gone."""
        assert self.transport is not None
        try:
            async for piece in pieces:
                if self.lost.is_set():
                    return False
                self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        except ConnectionError:
            return False
        finally:
            await pieces.aclose()
        self.transport.write(b"0\r\n\r\n")
        return True


class Listener:
    """A port of the loopback interface that ``handler`` answers; ``url`` is its address on 127.0.0.1."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.connections: set[Connection] = set()
        self.server: asyncio.Server | None = None
        self.url = ""

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> str:
        """Listen, on any free port by default; return the URL."""
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(
            lambda: Connection(self.handler, self.connections), host, port, backlog=4096
        )
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self.url

    async def drop_dead(self) -> None:
        """Free the port and cut every connection, in the middle of whatever it does."""
        assert self.server is not None
        # A connection that is accepted while the server closes is lost without a reset (asyncio fails to attach it and
        # keeps its socket until the next garbage collection): accept no more, and let those accepted be made first.
        asyncio.get_running_loop().remove_reader(self.server.sockets[0].fileno())
        for _ in range(3):
            await asyncio.sleep(0)
        self.server.close()
        for connection in list(self.connections):
            if connection.task is not None:
                connection.task.cancel()
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0)
