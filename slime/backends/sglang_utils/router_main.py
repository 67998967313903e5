"""Run a router: ``python -m slime.backends.sglang_utils.router_main PACKAGE OPTIONS.json [PORT]``.

The file, which only this user can read, keeps the API key off the command line, and spares turning every option into a
flag and back.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import socket
import sys
import threading
import time
from typing import Any

LISTENER_DEADLINE_S = 60.0
LISTENER_POLL_S = 0.05


def router_options(router_args: type[Any], fields: dict[str, Any]) -> Any:
    """Return ``router_args(**fields)``.

    Raises:
        ValueError: the installed router has no such option.
    """
    known = {f.name for f in dataclasses.fields(router_args)}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(
            f"The router {router_args.__module__.split('.')[0]} has no option {', '.join(unknown)}; it has: "
            f"{', '.join(sorted(known))}."
        )
    return router_args(**fields)


def close_listener(port: int, deadline_s: float = LISTENER_DEADLINE_S) -> bool:
    """Stop listening at ``port`` as soon as this process does; False when it has not by the deadline.

    Routers have no option against the port of their counters, which has no authentication. The descriptor stays, of
    nothing that a client could connect to: what waits for connections there waits forever. It is one that epoll takes,
    as the router may not have registered its listener yet.
    """
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(fd)) as found:
                    listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if not listens or found.getsockname()[1] != port:
                        continue
            except OSError:  # closed meanwhile
                continue
            nothing = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            os.dup2(nothing, fd, inheritable=False)
            os.close(nothing)
            return True
        time.sleep(LISTENER_POLL_S)
    return False


def main() -> None:
    """Read the options and serve until a signal ends the process.

    A third word is the port of the router's counters where they were not requested. (sglang-router does not let
    another thread of Python run: its port stays.)
    """
    package, path = sys.argv[1], sys.argv[2]
    if len(sys.argv) > 3:
        threading.Thread(target=close_listener, args=(int(sys.argv[3]),), daemon=True).start()
    with open(path) as file:
        fields = json.load(file)
    launcher = importlib.import_module(f"{package}.launch_router")
    launcher.launch_router(router_options(launcher.RouterArgs, fields))


if __name__ == "__main__":
    main()
