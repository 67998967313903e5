"""The port that routers open for their counters is closed where it was not asked for."""

from __future__ import annotations

import select
import socket
import threading

import pytest

from slime.backends.sglang_utils.router_main import close_listener


def test_a_listener_of_this_process_is_closed_and_its_owner_notices_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as counters:
        port = counters.getsockname()[1]
        assert close_listener(port, 5.0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=2.0)
        socket.create_connection(other.getsockname(), timeout=2.0).close()
        with pytest.raises(OSError, match="Socket operation on non-socket"):
            counters.accept()


def test_a_listener_may_be_closed_before_its_owner_waits_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as counters, select.epoll() as waiting:
        assert close_listener(counters.getsockname()[1], 5.0)
        waiting.register(counters.fileno(), select.EPOLLIN)
        assert waiting.poll(0.2) == []


def test_it_may_come_later_or_never() -> None:
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))
        port = late.getsockname()[1]
        closed: list[bool] = []
        waiting = threading.Thread(target=lambda: closed.append(close_listener(port, 10.0)))
        waiting.start()
        late.listen()
        waiting.join(15.0)
        assert closed == [True]
    assert close_listener(port, 0.2) is False
