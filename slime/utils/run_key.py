"""The run's key goes with every request to the run's own servers, from every HTTP client, and nowhere else.

Code written for servers without a key asks the router by aiohttp, httpx (the openai package), requests or urllib, with
no ``Authorization`` or with a stand-in such as ``Bearer EMPTY``. In the process that runs users' functions
:func:`install` makes these clients send the key (those of aiohttp that are made from then on). It is looked up by host
and port for every request that is sent, redirects included: what goes to another address, or through a proxy,
is sent as its caller made it.
"""

from __future__ import annotations

import functools
import hmac
import importlib.util
import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from urllib.request import Request

    from yarl import URL

VARIABLE = "SLIME_SERVER_KEYS"
"""A JSON object, address -> key: servers that others started (``slime serve``) and that users' functions ask."""
_keys: dict[tuple[str, int], str] = {}
_others: dict[tuple[str, int], str] = {}
_version = 0
_installed = False


def add(url: str, key: str | None, admin_key: str | None = None) -> None:
    """The server at ``url`` is one of the run's, and asks for ``key``.

    A request that has ``admin_key`` keeps it.
    """
    global _version
    address = urlsplit(url)
    if key and address.hostname and address.port:
        _version += 1
        _keys[address.hostname, address.port] = key
        if admin_key:
            _others[address.hostname, address.port] = admin_key


def forget(url: str) -> None:
    """The server at ``url`` has ended: whoever takes its port gets no key."""
    global _version
    address = urlsplit(url)
    _version += 1
    for keys in (_keys, _others):
        keys.pop(_place(address.hostname, address.port), None)


def control_key_for(host: str | None, port: int | None) -> str | None:
    """Return the second key of the server there; stock SGLang wants it for aborts too."""
    return _others.get(_place(host, port))


def key_for(scheme: str, host: str | None, port: int | None) -> str | None:
    """Return the key of the server there; None for one that is not the run's."""
    return _keys.get(_place(host, port)) if scheme == "http" else None


def version() -> int:
    """Return a number that changes when a server is added or forgotten."""
    return _version


def _place(host: str | None, port: int | None) -> tuple[str, int]:
    return (host or "").lower().strip("[]"), port or 0


def _header(scheme: str, host: str | None, port: int | None, given: str | bytes | None) -> str | None:
    """Return what ``Authorization`` is to be instead of ``given``; None where it stays."""
    key = key_for(scheme, host, port)
    other = control_key_for(host, port)
    # requests takes bytes for a header, too
    found = given if isinstance(given, bytes) else (given or "").encode(errors="replace")
    if key is None or (other and hmac.compare_digest(found, f"Bearer {other}".encode())):
        return None
    return f"Bearer {key}"


def install() -> None:
    """Let the HTTP clients of this process send the key to the run's servers. Calling it again does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    for url, key in _given():
        add(url, key)
    _for_aiohttp()
    _for_requests()
    _for_urllib()
    if importlib.util.find_spec("httpx") is not None:
        _for_httpx()


def _given() -> Iterable[tuple[str, str]]:
    try:
        return dict(json.loads(os.environ.get(VARIABLE) or "{}")).items()
    except (ValueError, TypeError) as e:
        raise ValueError(
            f'{VARIABLE} is no JSON object of addresses and keys, {{"http://host:port": "key"}}: {e}'
        ) from e


def _for_aiohttp() -> None:
    from aiohttp import ClientRequest, ClientSession

    class KeyedRequest(ClientRequest):
        def __init__(self, method: str, url: URL, **options: Any) -> None:  # one for each hop
            super().__init__(method, url, **options)
            header = _header(url.scheme, url.host, url.port, self.headers.get("Authorization"))
            if header is not None and options.get("proxy") is None:
                self.headers["Authorization"] = header

    made = ClientSession.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **{"request_class": KeyedRequest, **options})

    ClientSession.__init__ = init  # type: ignore[method-assign]


def _for_requests() -> None:
    from requests.adapters import HTTPAdapter
    from requests.utils import select_proxy

    sent = HTTPAdapter.send

    @functools.wraps(sent)
    def send(self: Any, request: Any, *args: Any, **options: Any) -> Any:
        address = urlsplit(request.url)
        given = request.headers.get("Authorization")
        header = _header(address.scheme, address.hostname, address.port, given)
        # ``proxies`` is the fifth parameter.
        proxies = options.get("proxies") or (args[4] if len(args) > 4 else None)
        if header is not None and not select_proxy(request.url, proxies):
            request = request.copy()  # the headers of the caller's own are copied into redirects
            request.headers["Authorization"] = header
        return sent(self, request, *args, **options)

    HTTPAdapter.send = send  # type: ignore[method-assign]


def _for_urllib() -> None:
    from urllib.request import HTTPHandler

    opened = HTTPHandler.http_open

    @functools.wraps(opened)
    def http_open(self: Any, request: Request) -> Any:
        address = urlsplit(request.full_url)
        given = request.get_header("Authorization")
        header = _header(address.scheme, address.hostname, address.port, given)
        if header is not None and request.host == address.netloc:  # else it goes to a proxy
            request.remove_header("Authorization")
            request.add_unredirected_header("Authorization", header)
        return opened(self, request)

    HTTPHandler.http_open = http_open  # type: ignore[method-assign, assignment]


def _for_httpx() -> None:
    import httpcore
    import httpx

    def with_key(transport: httpx.HTTPTransport | httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Request:
        url = request.url
        header = _header(url.scheme, url.host, url.port, request.headers.get("Authorization"))
        if header is None or isinstance(transport._pool, httpcore.HTTPProxy | httpcore.AsyncHTTPProxy):
            return request
        headers = request.headers.copy()  # the headers of the caller's own are copied into redirects
        headers["Authorization"] = header
        return httpx.Request(request.method, url, headers=headers, stream=request.stream, extensions=request.extensions)

    handled, handled_async = httpx.HTTPTransport.handle_request, httpx.AsyncHTTPTransport.handle_async_request

    @functools.wraps(handled)
    def handle_request(self: Any, request: httpx.Request) -> httpx.Response:
        return handled(self, with_key(self, request))

    @functools.wraps(handled_async)
    async def handle_async_request(self: Any, request: httpx.Request) -> httpx.Response:
        return await handled_async(self, with_key(self, request))

    httpx.HTTPTransport.handle_request = handle_request  # type: ignore[method-assign]
    httpx.AsyncHTTPTransport.handle_async_request = handle_async_request  # type: ignore[method-assign]
