"""Addresses and ports of this host."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import closing


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
