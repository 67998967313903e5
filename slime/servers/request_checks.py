"""Checks of every request to a server of slime, before anything of it is believed.

Web pages make browsers send requests to this host: those are known by their ``Origin``, by a ``Host`` that is no name
of this host (DNS rebinding), and by content types that need no permission of the server.
"""

from __future__ import annotations

import asyncio
import os
import socket
import zlib
from collections.abc import Callable, Iterable
from functools import cache
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from slime.servers.auth import is_loopback
from slime.servers.bounded_site import Handler, connection_of

HOSTS_VARIABLE = "SLIME_ALLOWED_HOSTS"
MAX_DEPTH = 100
"""Of JSON. What reads it afterwards recurses."""
BODY_DEADLINE_S = 300.0
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_LOCAL_SUFFIXES = (".localhost", ".local", ".internal")


class RequestError(Exception):
    """A request that is refused: the HTTP ``status`` and why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def browser_guard(refuse: Callable[[int, str], web.Response]) -> Any:
    """Return the middleware that answers requests of other sites with what ``refuse(status, message)`` returns."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = connection_of(request)
        if connection is not None:
            connection.request_began()
        try:
            check_source(request)
        except RequestError as e:
            return refuse(e.status, e.message)
        try:
            return await handler(request)
        finally:
            if connection is not None:
                connection.request_ended()

    middleware.tells_connections = True  # type: ignore[attr-defined]
    return middleware


def check_source(request: web.Request) -> None:
    """Raise RequestError for what a page of another site may have made a browser send."""
    host = request.headers.get("Host", "")
    if host and _came_over_loopback(request) and not _is_local_name(host):
        raise RequestError(403, f"Host {host!r:.100} is no name of this host; {HOSTS_VARIABLE} has those to allow")
    if request.method in _SAFE_METHODS:
        return
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != host:
        raise RequestError(403, f"Origin {origin!r:.100} is not this server: web pages of other sites have no access")
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        raise RequestError(403, "Sec-Fetch-Site: web pages of other sites have no access")
    # a page can send a body without a type, but no token with it
    untyped = "Content-Type" not in request.headers and "Authorization" in request.headers
    if request.body_exists and not untyped and not _is_json(request.content_type):
        given = request.headers.get("Content-Type")
        raise RequestError(415, f"Content-Type must be application/json, not {given!r:.100}")


async def read_json(request: web.Request) -> Any:
    """Return the body of ``request``. Raises RequestError when it is too large, too slow, or no strict JSON."""
    limit = request.client_max_size
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            data = await request.read()
    except TimeoutError:
        raise RequestError(408, f"the body has not arrived within {BODY_DEADLINE_S:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise RequestError(413, f"the body is larger than {limit} bytes") from None
    except (HttpProcessingError, web.RequestPayloadError):
        raise RequestError(400, "the body cannot be read: it is not what its headers say") from None
    connection = connection_of(request)
    if connection is not None:
        connection.body_arrived()
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding != "identity" and getattr(request.content, "total_compressed_bytes", None) is None:
        data = await asyncio.to_thread(decompressed, data, encoding, limit)
    return parse_json(data)


def parse_json(data: bytes) -> Any:
    """Return the value of strict JSON: no NaN, no number beyond a float, no half of a surrogate pair, at most
    ``MAX_DEPTH`` deep. Raises RequestError."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as e:
        raise RequestError(400, f"the body is not JSON: {e}") from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise RequestError(400, f"the body is not JSON that can be taken: it is nested deeper than {MAX_DEPTH}")
    return value


def decompressed(data: bytes, encoding: str, limit: int) -> bytes:
    """Return what ``data`` is without its ``Content-Encoding``. Raises RequestError, from ``limit`` bytes on too."""
    windows = {"gzip": [16 + zlib.MAX_WBITS], "deflate": [zlib.MAX_WBITS, -zlib.MAX_WBITS]}
    if encoding.removeprefix("x-") not in windows:
        raise RequestError(415, f"Content-Encoding must be gzip, deflate or identity, not {encoding!r:.50}")
    for window in windows[encoding.removeprefix("x-")]:
        stream = zlib.decompressobj(window)
        try:
            plain = stream.decompress(data, limit + 1)
        except zlib.error:
            continue
        if len(plain) > limit:
            raise RequestError(413, f"the body is larger than {limit} bytes when it is decompressed")
        if stream.eof and not stream.unused_data:
            return plain
    raise RequestError(400, f"the body is not {encoding}, as its Content-Encoding says, or is cut off")


def _is_deeper(value: object, depth: int) -> bool:
    level = [value]
    for _ in range(depth + 1):
        level = [inner for outer in level for inner in _inside(outer)]
    return bool(level)


def _inside(value: object) -> Iterable[Any]:
    """The elements of an array and the values of an object."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or (
        content_type.startswith("application/") and content_type.endswith("+json")
    )


def _came_over_loopback(request: web.Request) -> bool:
    address = None if request.transport is None else request.transport.get_extra_info("sockname")
    return isinstance(address, tuple) and is_loopback(str(address[0]))


def _is_local_name(host: str) -> bool:
    """True for addresses, which no DNS record makes, names of this host or of private networks, and allowed names."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    allowed = os.environ.get(HOSTS_VARIABLE, "").lower().replace(",", " ").split()
    if name in allowed or "*" in allowed or name in _own_names():
        return True
    try:
        ip_address(name)
    except ValueError:
        return bool(name) and ("." not in name or name.endswith(_LOCAL_SUFFIXES))
    return True


@cache
def _own_names() -> frozenset[str]:
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})
