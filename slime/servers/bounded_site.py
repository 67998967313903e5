"""A site (listening socket) of an aiohttp application, with bounds that a flood of connections does not exceed.

A connection that sends no whole request in time is closed. Where there are as many connections as may be, the one that
has waited longest without a request at work gives way to a new one, so that the server stays reachable. A process that
is out of files waits a moment before it accepts again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from slime.servers.auth import is_loopback
from slime.utils.bounded_log import BoundedLog

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)
told = BoundedLog(logger)

HEADER_DEADLINE_S = 20.0
"""For the first request of a connection to arrive, up to its body."""
KEEP_ALIVE_S = 75.0
WRITE_DEADLINE_S = 300.0
"""For a client to continue reading an answer."""
MOST_CONNECTIONS = 4096
BACKLOG = 128
ACCEPT_PAUSE_S = 0.5


class _NotOfClients(logging.Filter):
    """Leaves out what is no HTTP, which is answered with 400, and is the client's mistake."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


_errors = logging.getLogger(f"{__name__}.errors")
_errors.addFilter(_NotOfClients())
PLAIN_RUNNER_OPTIONS: dict[str, Any] = {"keepalive_timeout": KEEP_ALIVE_S, "logger": _errors}
"""For every runner."""
RUNNER_OPTIONS: dict[str, Any] = {**PLAIN_RUNNER_OPTIONS, "auto_decompress": False}
"""For one whose handlers read bodies with ``request_checks.read_json``, which decompresses them within bounds."""
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def most_connections() -> int:
    """Return how many connections a server holds: half of the files that the process may open, at most 4096."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(8, min(MOST_CONNECTIONS, soft // 2))


class Connection(asyncio.Protocol):
    """One connection: passes everything on to aiohttp's ``inner`` protocol and knows whether it may be closed."""

    def __init__(self, inner: asyncio.Protocol, site: BoundedSite, peer: str) -> None:
        self.inner, self.site, self.peer = inner, site, peer
        self.transport: asyncio.Transport | None = None
        self.since = time.monotonic()
        self._at_work = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._close_in(HEADER_DEADLINE_S)
        self.inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        self.site.forget(self)
        self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self._close_in(WRITE_DEADLINE_S)
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self._cancel()
        self.inner.resume_writing()

    def request_began(self) -> None:
        """Note that the head of a request is here."""
        self._cancel()

    def body_arrived(self) -> None:
        """Note that a request is whole: the server is at work on it."""
        self._at_work = True

    def request_ended(self) -> None:
        """Note that its answer is made."""
        self._at_work, self.since = False, time.monotonic()

    @property
    def waits(self) -> bool:
        """True when the client is what the server waits for."""
        return not self._at_work and (self.transport is None or not self.transport.get_write_buffer_size())

    def abort(self) -> None:
        """Close it at once."""
        if self.transport is not None:
            self.transport.abort()

    def _close_in(self, seconds: float) -> None:
        self._cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@web.middleware
async def noted(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell the connection of the requests of an application that does not do so as it reads them."""
    connection = connection_of(request)
    if connection is None:
        return await handler(request)
    connection.request_began()
    connection.body_arrived()  # when it does is not known: it must not be closed while its handler works
    try:
        return await handler(request)
    finally:
        connection.request_ended()


noted.tells_connections = True  # type: ignore[attr-defined]


def tells_connections(app: web.Application) -> bool:
    """Return whether a middleware of ``app`` reports requests to their connections, as ``browser_guard`` does."""
    return any(getattr(middleware, "tells_connections", False) for middleware in app.middlewares)


def connection_of(request: web.Request) -> Connection | None:
    """Return the connection that ``request`` came on; None for a server that was not started by a ``BoundedSite``."""
    found = None if request.transport is None else request.transport.get_protocol()
    return found if isinstance(found, Connection) else None


class BoundedSite(web.BaseSite):
    """Listens on every address of ``host``. ``limit`` connections at a time, half of them of one other host."""

    def __init__(self, runner: web.AppRunner, host: str, port: int, limit: int | None = None) -> None:
        super().__init__(runner)
        self._host, self._port = host, port
        self._limit = most_connections() if limit is None else limit
        self._connections: dict[Connection, None] = {}
        self._peers: Counter[str] = Counter()

    @property
    def name(self) -> str:
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Begin to accept. Raises OSError for an address that cannot be had."""
        await super().start()
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._host or None, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listening = _Listening(loop)
        self._server = listening  # type: ignore[assignment]
        try:
            for family, *_, address in dict.fromkeys(found):
                listening.add(_listen(family, address), self._accept)
        except OSError:
            listening.close()
            raise

    def forget(self, connection: Connection) -> None:
        """Count a connection as closed."""
        if self._connections.pop(connection, connection) is None:
            self._peers[connection.peer] -= 1
            if not self._peers[connection.peer]:
                del self._peers[connection.peer]

    def _accept(self, listener: socket.socket, pause: Callable[[], None]) -> None:
        for _ in range(BACKLOG):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as e:
                if e.errno not in _OUT_OF_RESOURCES:
                    raise
                told.tell("out of files (%s): %s accepts again in %g s", e.strerror, self.name, ACCEPT_PAUSE_S)
                pause()
                return
            sock.setblocking(False)
            self._admit(sock, str(address[0]))

    def _admit(self, sock: socket.socket, peer: str) -> None:
        server = self._runner.server
        if server is None or not self._make_room(peer):
            sock.close()
            return
        connection = Connection(server(), self, peer)
        self._connections[connection] = None
        self._peers[peer] += 1
        loop = asyncio.get_running_loop()
        made = loop.create_task(loop.connect_accepted_socket(lambda: connection, sock))
        made.add_done_callback(lambda task: self._made(task, connection, sock))

    def _made(self, task: asyncio.Task[Any], connection: Connection, sock: socket.socket) -> None:
        if task.cancelled() or task.exception() is not None:
            self.forget(connection)
            sock.close()

    def _make_room(self, peer: str) -> bool:
        """Close a connection that waits for its client if there are too many; False when none does."""
        crowded = not is_loopback(peer) and self._peers[peer] >= self._limit // 2
        if len(self._connections) < self._limit and not crowded:
            return True
        waiting = (c for c in self._connections if c.waits and (not crowded or c.peer == peer))
        oldest = min(waiting, key=lambda connection: connection.since, default=None)
        told.tell("%d connections to %s, as many as may be: those that wait are closed", len(self._connections),
                     self.name)  # fmt: skip
        if oldest is None:
            return False
        oldest.abort()
        self.forget(oldest)
        return True


class _Listening:
    """The sockets of a site."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.sockets: list[socket.socket] = []

    def add(self, sock: socket.socket, accept: Callable[[socket.socket, Callable[[], None]], None]) -> None:
        self.sockets.append(sock)

        def resume() -> None:
            if sock in self.sockets:
                self._loop.add_reader(sock, accept, sock, pause)

        def pause() -> None:
            self._loop.remove_reader(sock)
            self._loop.call_later(ACCEPT_PAUSE_S, resume)

        resume()

    def close(self) -> None:
        while self.sockets:
            sock = self.sockets.pop()
            self._loop.remove_reader(sock)
            sock.close()


def _listen(family: int, address: tuple[Any, ...] | str) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setblocking(False)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def run_app(app: web.Application, host: str, port: int, **options: Any) -> None:
    """Serve ``app`` until SIGINT or SIGTERM. ``options`` go to ``web.AppRunner``."""
    asyncio.run(_run(web.AppRunner(app, **RUNNER_OPTIONS, **options), host, port))


async def _run(runner: web.AppRunner, host: str, port: int) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        await runner.setup()
        await BoundedSite(runner, host, port).start()
        for address in runner.addresses:
            logger.info("listening on %s:%d", *address[:2])
        await ended.wait()
    finally:
        await runner.cleanup()
