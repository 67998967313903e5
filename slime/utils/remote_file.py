"""Fetch a file that a data set, a tool or an agent names: from public hosts alone, within a deadline and a size.

An address that is not ours to reach (loopback, private and link-local networks, metadata services of clouds) is
refused. The host's name is resolved once, every address it has is checked, and the connection goes to a checked one:
a name that resolves to another address a moment later changes nothing. Redirects are checked as the first address is.
Proxies of the environment are not used: they would resolve the name again.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from typing import Any
from urllib.parse import SplitResult, quote, urljoin, urlsplit

MAX_REDIRECTS = 3
_CHUNK = 65536
_IN_PATHS = "/%~!$&'()*+,;=:@[]"
_REDIRECTS = (301, 302, 303, 307, 308)


class RemoteFileError(ValueError):
    """A file that was not fetched; the message says why."""


def fetch(url: str, max_bytes: int, deadline_s: float) -> bytes:
    """Return the content of ``url`` (http or https). Raises RemoteFileError for one that may not be fetched, fails, has
    more than ``max_bytes`` or takes longer than ``deadline_s`` s in all."""
    found: list[bytes | BaseException] = []
    deadline = time.monotonic() + deadline_s
    name = f"{url:.80}"

    def work() -> None:
        try:
            found.append(_follow(url, max_bytes, deadline))
        except Exception as e:  # noqa: BLE001  (raised below, in the caller's thread)
            found.append(e)

    # Names are resolved without a deadline: the caller does not wait for a thread that is stuck there.
    thread = threading.Thread(target=work, name="fetch", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if not found or (isinstance(found[0], Exception) and time.monotonic() >= deadline):
        raise RemoteFileError(f"{name} was not fetched within {deadline_s:g} s")
    if isinstance(found[0], bytes):
        return found[0]
    if isinstance(found[0], RemoteFileError):
        raise found[0]
    raise RemoteFileError(f"{name} cannot be fetched: {type(found[0]).__name__}: {found[0]}") from found[0]


def public_addresses(host: str, port: int) -> list[str]:
    """Return the addresses of ``host``. Raises RemoteFileError when one of them is not public."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:
        raise RemoteFileError(f"the host {host} is not known: {e}") from e
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if refused := [address for address in addresses if not is_public(address)]:
        raise RemoteFileError(f"the host {host} is at {refused[0]}, which is no public address: it is not fetched from")
    return addresses


def is_public(address: str) -> bool:
    """Return True for an address of the public internet, also when it is written within an IPv6 address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in ipaddress.ip_network("64:ff9b::/96"):  # NAT64
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if ip not in ipaddress.ip_network("2000::/3"):  # all others are local, or IPv4 in forms that are out of use
            return False
    return ip.is_global and not ip.is_multicast


def _follow(url: str, max_bytes: int, deadline: float) -> bytes:
    for _ in range(MAX_REDIRECTS + 1):
        answer = _get(url, max_bytes, deadline)
        if isinstance(answer, bytes):
            return answer
        url = urljoin(url, answer)
    raise RemoteFileError(f"{url:.80}: more than {MAX_REDIRECTS} redirects")


def _get(url: str, max_bytes: int, deadline: float) -> bytes | str:
    """Return what is at ``url``, or the address that it redirects to."""
    parts = urlsplit(url)
    name = f"{url:.80}"
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise RemoteFileError(f"{name}: only http and https addresses without a user are fetched")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    connection = _connect(parts, public_addresses(parts.hostname, port), port, deadline)
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), _shut, [connection.sock])
    timer.daemon = True
    timer.start()
    try:
        target = quote(parts.path or "/", _IN_PATHS) + (
            f"?{quote(parts.query, _IN_PATHS + '?')}" if parts.query else ""
        )
        connection.request("GET", target, headers={"Accept": "image/*", "User-Agent": "slime", "Connection": "close"})
        response = connection.getresponse()
        if response.status in _REDIRECTS and (location := response.getheader("Location")):
            return location
        if response.status != 200:
            raise RemoteFileError(f"{name} answered {response.status} {response.reason}")
        body = _body(response, name, max_bytes)
        if time.monotonic() >= deadline:  # a file without a stated length may have been cut there
            raise TimeoutError
        return body
    finally:
        timer.cancel()
        connection.close()


def _body(response: http.client.HTTPResponse, name: str, max_bytes: int) -> bytes:
    if response.length is not None and response.length > max_bytes:
        raise RemoteFileError(f"{name} has {response.length} bytes; {max_bytes} are allowed")
    body = bytearray()
    while chunk := response.read(_CHUNK):
        body += chunk
        if len(body) > max_bytes:
            raise RemoteFileError(f"{name} has more than {max_bytes} bytes")
    if response.length:
        raise RemoteFileError(f"{name} ended {response.length} bytes early")
    return bytes(body)


def _connect(parts: SplitResult, addresses: list[str], port: int, deadline: float) -> http.client.HTTPConnection:
    """Connect to the first of ``addresses`` that answers, and speak to it as to the host of the URL: also in its
    certificate."""
    host = str(parts.hostname)
    sock: Any = None
    for address in addresses:
        left = max(0.1, deadline - time.monotonic())
        try:
            sock = socket.create_connection((address, port), timeout=left)
            break
        except OSError:
            if address == addresses[-1]:
                raise
    connection = http.client.HTTPConnection(host, port, timeout=left)
    try:
        if parts.scheme == "https":
            connection.default_port = 443
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
    except BaseException:
        sock.close()
        raise
    connection.sock = sock
    return connection


def _shut(sock: socket.socket | None) -> None:
    """End every read of ``sock``, in whatever thread."""
    if sock is not None:
        with contextlib.suppress(OSError):  # it is closed already
            socket.socket.shutdown(sock, socket.SHUT_RDWR)
