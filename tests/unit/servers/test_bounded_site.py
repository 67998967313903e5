"""Floods of connections: they are closed in time, the server stays reachable, and neither files nor the log run out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web

from slime.servers import bounded_site
from slime.servers.bounded_site import RUNNER_OPTIONS, BoundedSite, most_connections
from slime.servers.request_checks import browser_guard, read_json

HALF_A_HEAD = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "


class Served:
    def __init__(self, site: BoundedSite, port: int) -> None:
        self.site, self.port, self.url = site, port, f"http://127.0.0.1:{port}/"
        self.going_on, self.may_end = asyncio.Event(), asyncio.Event()
        self.sockets: list[socket.socket] = []

    def connect(self, sent: bytes = b"") -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        sock.sendall(sent)
        self.sockets.append(sock)
        return sock

    async def flood(self, count: int, sent: bytes = HALF_A_HEAD) -> list[socket.socket]:
        made = []
        for _ in range(count):
            made.append(self.connect(sent))
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        return made

    async def get(self) -> int:
        async with asyncio.timeout(20), aiohttp.ClientSession() as session, session.get(self.url) as reply:
            return reply.status


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """At most 16 connections. A POST is at work until ``may_end``."""

    async def work(request: web.Request) -> web.Response:
        await read_json(request)
        server.going_on.set()
        await server.may_end.wait()
        return web.json_response({})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application(middlewares=[browser_guard(lambda status, message: web.Response(status=status))])
    app.router.add_post("/", work)
    app.router.add_get("/", health)
    runner = web.AppRunner(app, **RUNNER_OPTIONS)
    await runner.setup()
    site = BoundedSite(runner, "127.0.0.1", 0, limit=16)
    await site.start()
    server = Served(site, runner.addresses[0][1])
    yield server
    server.may_end.set()
    for sock in server.sockets:
        sock.close()
    await runner.cleanup()


async def is_closed(sock: socket.socket) -> bool:
    def wait() -> bool:
        sock.settimeout(20)
        try:
            return sock.recv(100) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False

    return await asyncio.to_thread(wait)


@pytest.mark.parametrize("sent", [b"", b"P", HALF_A_HEAD, HALF_A_HEAD + b"a" * 4000], ids=len)
async def test_a_head_that_does_not_come_is_given_up(served, monkeypatch, sent):
    monkeypatch.setattr(bounded_site, "HEADER_DEADLINE_S", 0.2)
    began = time.monotonic()
    assert await is_closed(served.connect(sent))
    assert time.monotonic() - began < 10


async def test_a_server_that_is_full_of_waiting_connections_answers(served, caplog):
    for _ in range(4):
        await served.flood(40)
        assert await served.get() == 200
        assert len(served.site._connections) <= 16
    assert len([r for r in caplog.records if "as many as may be" in r.getMessage()]) <= 51


async def test_a_request_at_work_is_not_closed_for_others(served):
    async with aiohttp.ClientSession() as session:
        turn = asyncio.create_task(session.post(served.url, json={}))
        await asyncio.wait_for(served.going_on.wait(), 20)
        await served.flood(60)
        assert await served.get() == 200
        served.may_end.set()
        async with asyncio.timeout(20), await turn as reply:
            assert reply.status == 200


async def test_a_body_that_trickles_gives_way_and_many_requests_at_work_do_not(served):
    head = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n"
    trickling = await served.flood(16, head + b"{")
    assert await served.get() == 200
    assert await is_closed(trickling[0])
    at_work = await served.flood(16, head + b"{}")
    refused = served.connect(head)
    assert await is_closed(refused)
    assert len(served.site._connections) == 16
    served.may_end.set()
    for sock in at_work:
        assert (await asyncio.to_thread(sock.recv, 100)).startswith(b"HTTP/1.1 200")


async def test_another_host_has_half_of_the_connections(served, monkeypatch):
    monkeypatch.setattr(bounded_site, "is_loopback", lambda host: False)
    await served.flood(40)
    assert len(served.site._connections) <= 8
    assert await served.get() == 200


async def test_a_client_that_does_not_read_is_closed(served, monkeypatch):
    monkeypatch.setattr(bounded_site, "WRITE_DEADLINE_S", 0.2)
    [connection] = [await _connected(served)]
    connection.pause_writing()
    async with asyncio.timeout(20):
        while served.site._connections:
            await asyncio.sleep(0.01)


async def _connected(served: Served) -> Any:
    served.connect()
    while not served.site._connections:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    return next(iter(served.site._connections))


async def test_connections_that_come_and_go_leave_nothing(served):
    files = len(psutil.Process().open_files()), psutil.Process().num_fds()
    for _ in range(50):
        for sock in await served.flood(5):
            sock.close()
    async with asyncio.timeout(20):
        while served.site._connections:
            await asyncio.sleep(0.01)
    assert served.site._peers == {}
    assert psutil.Process().num_fds() <= files[1] + 5


@pytest.mark.parametrize(("files", "expected"), [(256, 128), (10, 8), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)])
def test_how_many_connections_there_may_be(monkeypatch, files, expected):
    monkeypatch.setattr(bounded_site.resource, "getrlimit", lambda kind: (files, files))
    assert most_connections() == expected


@pytest.mark.slow
async def test_a_process_that_is_out_of_files_waits_and_recovers(served, caplog):
    """As where something else of the process takes the files; asyncio's own servers spin and log then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with caplog.at_level(logging.WARNING):
        resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 8, hard))
        try:
            made = []
            with contextlib.suppress(OSError):  # the client is of the same process
                for _ in range(20):
                    made.append(served.connect())
            began = time.process_time()
            await asyncio.sleep(1.5)
            assert time.process_time() - began < 0.5
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for sock in made:
                sock.close()
        assert await served.get() == 200
    assert len(caplog.records) < 20


LORIS = """
import logging, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
logging.basicConfig()
from slime.servers import bounded_site
bounded_site.HEADER_DEADLINE_S = 2.0
from slime_plugins.rollout_buffer.buffer import RolloutBuffer, make_app
bounded_site.run_app(make_app(RolloutBuffer({}), key="k"), "127.0.0.1", int(sys.argv[1]), access_log=None)
"""


@pytest.mark.slow
def test_slow_clients_do_not_hold_a_command_with_few_files(tmp_path):
    """300 of them, against 64 files."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "log"
    with log.open("wb") as file:
        server = subprocess.Popen([sys.executable, "-c", LORIS, str(port)], stdout=file, stderr=file)
    slow: list[socket.socket] = []
    try:
        deadline = time.monotonic() + 60
        while not _healthy(port):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        process = psutil.Process(server.pid)
        used = sum(process.cpu_times()[:2])
        for _ in range(300):
            slow.append(socket.create_connection(("127.0.0.1", port), timeout=20))
            slow[-1].sendall(HALF_A_HEAD)
        assert _healthy(port)
        time.sleep(4)
        assert _healthy(port)
        assert process.num_fds() < 20
        assert sum(process.cpu_times()[:2]) - used < 2
        assert log.stat().st_size < 50_000
    finally:
        for sock in slow:
            sock.close()
        server.terminate()
        assert server.wait(60) == 0


def _healthy(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            return sock.recv(100).startswith(b"HTTP/1.1 200")
    except OSError:
        return False
