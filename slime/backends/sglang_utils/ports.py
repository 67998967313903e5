"""Ports for servers, handed out so that the processes of one host do not choose the same one.

A port that is free when it is chosen can be taken by another process before the server binds it. Engines that start
together therefore take ports from a cursor that all processes of the user on this host share (a locked file); what is
left of the race (processes of others) is met by starting again with other ports.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

FIRST, LAST = 15000, 29999
"""Below the kernel's usual range of outgoing connections (32768 and up)."""


def reserve_ports(count: int, *, consecutive: bool = False, cursor_file: Path | None = None) -> list[int]:
    """Return ``count`` ports that are free now and that no other call on this host returned recently.

    With ``consecutive`` they follow each other. Raises RuntimeError when the range holds no such ports.
    """
    path = cursor_file or Path(tempfile.gettempdir()) / f"slime-ports-{os.getuid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        raw = os.read(fd, 16)
        start = int(raw) if raw.strip().isdigit() else FIRST
        if not FIRST <= start <= LAST:
            start = FIRST
        ports = _take(start, count, consecutive)
        os.lseek(fd, 0, os.SEEK_SET)
        os.ftruncate(fd, 0)
        os.write(fd, str(ports[-1] + 1).encode())
    finally:
        os.close(fd)
    return ports


def _take(start: int, count: int, consecutive: bool) -> list[int]:
    ports: list[int] = []
    for port in [*range(start, LAST + 1), *range(FIRST, start)]:
        if consecutive and ports and port != ports[-1] + 1:
            ports = []
        if is_free(port):
            ports.append(port)
            if len(ports) == count:
                return ports
        elif consecutive:
            ports = []
    raise RuntimeError(
        f"Expected {count} free{' consecutive' if consecutive else ''} TCP ports between {FIRST} and {LAST} on "
        f"{socket.gethostname()}, found {len(ports)}. End servers that are left from earlier runs."
    )


def is_free(port: int) -> bool:
    """True when a TCP server can bind ``port`` on every address of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def looks_like_port_conflict(lines: list[str]) -> bool:
    """True when the last lines of a server report that an address was taken."""
    text = "\n".join(lines).lower()
    return any(sign in text for sign in ("address already in use", "eaddrinuse", "port is already", "is not available"))
