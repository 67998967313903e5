"""Addresses and ports of this host."""

from __future__ import annotations

import ipaddress
import logging
import os
import resource
import socket
from contextlib import closing, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

MEETING_FILE = "SLIME_MEETING_FILE"
"""The variable of a trainer rank that names the file at which the ranks of one host meet."""
RESERVED_FILES = 1024
"""Open files that are left to what is no connection to the router."""
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_told: set[int] = set()


def prefer_ipv6() -> bool:
    """True when ``SLIME_PREFER_IPV6`` asks for IPv6 addresses."""
    return os.environ.get("SLIME_PREFER_IPV6", "").lower() in ("1", "true", "yes")


def _probe_address(family: socket.AddressFamily, target: str) -> str | None:
    """Return the local address the kernel would use towards ``target``; no packet is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 80))
            address = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if ipaddress.ip_address(address.split("%")[0]).is_unspecified else address


def get_host_info() -> tuple[str, str]:
    """Return ``(hostname, ip address)`` of this host.

    ``SLIME_HOST_IP`` overrides the address; ``SLIME_PREFER_IPV6`` selects the family. Otherwise the address of the
    default route is taken, then the host name's, then loopback.
    """
    hostname = socket.gethostname()
    override = os.environ.get("SLIME_HOST_IP")
    if override:
        return hostname, override
    v6 = prefer_ipv6()
    family = socket.AF_INET6 if v6 else socket.AF_INET
    address = _probe_address(family, "2001:4860:4860::8888" if v6 else "8.8.8.8")
    if address:
        return hostname, address
    try:
        found = socket.getaddrinfo(hostname, None, family, socket.SOCK_STREAM)
    except OSError:
        found = []
    if found:
        return hostname, str(found[0][4][0])
    return hostname, "::1" if v6 else "127.0.0.1"


def get_current_node_ip() -> str:
    """Return this host's address, without brackets."""
    return get_host_info()[1].strip("[]")


def _wrap_ipv6(host: str) -> str:
    """Return ``host`` with brackets when it is a bare IPv6 address, as URLs need it."""
    try:
        ipaddress.IPv6Address(host.strip("[]"))
    except ValueError:
        return host
    return f"[{host.strip('[]')}]"


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with an IPv6 address in brackets."""
    return f"{_wrap_ipv6(host)}:{port}"


def connection_limit(wanted: int) -> int:
    """Return how many of ``wanted`` connections this process can open to one address, with a warning if not all.

    The soft limit of open files is raised to the hard one if that helps.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted + RESERVED_FILES > soft != resource.RLIM_INFINITY and soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    files = wanted if soft == resource.RLIM_INFINITY else soft - min(RESERVED_FILES, soft // 2)
    try:
        low, high = map(int, PORT_RANGE.read_text().split())
        ports = (high - low + 1) * 9 // 10  # connections that were closed keep theirs for a while
    except (OSError, ValueError):
        ports = wanted
    limit = max(1, min(wanted, files, ports))
    if limit < wanted and wanted not in _told:
        _told.add(wanted)
        logger.warning(
            "at most %d requests are in flight, not %d: this process may open %d files (ulimit -Hn), and there are %d "
            "local ports for connections to one router (net.ipv4.ip_local_port_range)", limit, wanted, soft, ports,
        )  # fmt: skip
    return limit


def is_port_available(port: int) -> bool:
    """True when a TCP listener can bind ``port`` on all interfaces."""
    try:
        with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            probe.listen(1)
    except (OSError, OverflowError):
        return False
    return True


def find_available_port(base_port: int) -> int:
    """Return a free TCP port at or above ``base_port``, in steps of 42. Raises RuntimeError when none is left."""
    for port in range(base_port, 65536, 42):
        if is_port_available(port):
            return port
    raise RuntimeError(f"no free TCP port from {base_port} upwards")


def get_free_port(start_port: int = 10000, consecutive: int = 1) -> int:
    """Return the first port at or above ``start_port`` from which ``consecutive`` ports are free."""
    port = start_port
    while port + consecutive <= 65536:
        taken = next((p for p in range(port, port + consecutive) if not is_port_available(p)), None)
        if taken is None:
            return port
        port = taken + 1
    raise RuntimeError(f"no {consecutive} consecutive free TCP ports from {start_port} upwards")
