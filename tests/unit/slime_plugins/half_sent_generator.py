"""A generator that is forever in the middle of sending a trajectory."""

from __future__ import annotations

import socket
import threading
from typing import Any
from urllib.parse import urlsplit

TASK_TYPE = "half_sent"
HEAD = b"POST /buffer/write HTTP/1.1\r\nHost: buffer\r\nContent-Length: 1000\r\nExpect: 100-continue\r\n\r\n"


def run_rollout(data: dict[str, Any]) -> None:
    address = urlsplit(data["remote_buffer_url"])
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(HEAD)
        print(connection.recv(100), flush=True)
        threading.Event().wait()
