"""The order of the nodes of a run."""

from __future__ import annotations

import ipaddress
import socket


def node_sort_key(address: str) -> tuple[int, ...]:
    """Return a key that orders nodes by IP address number; names are resolved, or ordered by their characters."""
    try:
        return tuple(ipaddress.ip_address(address).packed)
    except ValueError:
        pass
    try:
        return tuple(ipaddress.ip_address(socket.gethostbyname(address)).packed)
    except OSError:
        return tuple(map(ord, address))
