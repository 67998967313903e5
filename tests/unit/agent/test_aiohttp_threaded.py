"""An application on a thread: it serves, stops, and says who may reach it."""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
import threading
import urllib.request
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web

from slime.agent.aiohttp_threaded import REQUIRES_TOKEN, FilteredAccessLogger, run_app_in_thread
from slime.servers import bounded_site


async def where(request: web.Request) -> web.Response:
    return web.json_response({"thread": threading.current_thread().name})


def app_of(handler=where) -> web.Application:
    app = web.Application()
    app.router.add_get("/", handler)
    return app


def fetch(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20) as reply:
        return reply.read().decode()


def test_it_serves_from_its_thread_until_it_is_stopped():
    handle = run_app_in_thread(app_of(), host="127.0.0.1", thread_name="my-app")
    try:
        assert handle.host == "127.0.0.1"
        assert fetch(handle.port) == '{"thread": "my-app"}'
        assert handle.thread.is_alive()
        assert handle.loop.is_running()
    finally:
        handle.stop()
    assert not handle.thread.is_alive()
    assert handle.loop.is_closed()
    handle.stop()  # again is no error
    with socket.create_server(("127.0.0.1", handle.port)):
        pass  # the port is free


def test_it_runs_the_callbacks_of_the_application():
    seen = []

    async def note(app: web.Application) -> None:
        seen.append(threading.current_thread().name)

    app = app_of()
    app.on_startup.append(note)
    app.on_cleanup.append(note)
    run_app_in_thread(app, host="127.0.0.1", thread_name="mine").stop()
    assert seen == ["mine", "mine"]


def test_a_port_in_use_is_an_error_here():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError) as caught:
            run_app_in_thread(app_of(), host="127.0.0.1", port=port)
    assert caught.value.__notes__ == [f"No application could listen on 127.0.0.1:{port}. Port 0 takes any free one."]


def test_an_application_that_does_not_start_is_given_up():
    async def wait(app: web.Application) -> None:
        await asyncio.Event().wait()

    app = app_of()
    app.on_startup.append(wait)
    with pytest.raises(TimeoutError, match=r"not listening on 127\.0\.0\.1:0 within 0\.1 s; look for a start-up"):
        run_app_in_thread(app, host="127.0.0.1", start_timeout_sec=0.1, thread_name="given-up")
    for thread in threading.enumerate():
        if thread.name == "given-up":
            thread.join(10)
            assert not thread.is_alive()


def test_an_error_at_the_start_is_raised_here():
    async def fail(app: web.Application) -> None:
        raise KeyError("no key")

    app = app_of()
    app.on_startup.append(fail)
    with pytest.raises(KeyError, match="no key"):
        run_app_in_thread(app, host="127.0.0.1")


def test_handlers_of_clients_that_left_are_cancelled():
    began, cancelled = threading.Event(), threading.Event()

    async def wait(request: web.Request) -> web.Response:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return web.Response()

    handle = run_app_in_thread(app_of(wait), host="127.0.0.1")
    try:
        with socket.create_connection(("127.0.0.1", handle.port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            assert began.wait(20)
        assert cancelled.wait(20)
    finally:
        handle.stop()


def test_a_plain_application_may_take_longer_than_a_head(monkeypatch):
    monkeypatch.setattr(bounded_site, "HEADER_DEADLINE_S", 0.3)

    async def echo(request: web.Request) -> web.Response:
        await asyncio.sleep(0.6)
        return web.json_response(await request.json())

    async def ask(port: int) -> list[int]:
        answers = []
        body = gzip.compress(b"[1]")
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
            for _ in range(2):
                async with session.post(f"http://127.0.0.1:{port}/", data=body, headers=headers) as reply:
                    answers += await reply.json()
                await asyncio.sleep(0.4)
        return answers

    app = web.Application()
    app.router.add_post("/", echo)
    handle = run_app_in_thread(app, host="127.0.0.1")
    try:
        assert asyncio.run(ask(handle.port)) == [1, 1]
    finally:
        handle.stop()


@pytest.mark.parametrize(
    ("host", "token", "level", "words"),
    [
        ("0.0.0.0", False, "WARNING", "WITHOUT A TOKEN: whoever can reach this host"),
        ("0.0.0.0", True, "INFO", "requests need the token of an open session"),
        ("127.0.0.1", False, None, ""),
    ],
)
def test_who_may_reach_it_is_said(caplog, host, token, level, words):
    app = app_of()
    app[REQUIRES_TOKEN] = token
    with caplog.at_level(logging.INFO, "slime"):
        handle = run_app_in_thread(app, host=host)
        handle.stop()
    said = [(record.levelname, record.getMessage()) for record in caplog.records if record.name.startswith("slime")]
    if level is None:
        assert said == []
    else:
        [(found, message)] = said
        assert found == level
        assert words in message
        assert f"{host}:{handle.port}" in message


@pytest.mark.parametrize(
    ("method", "status", "seconds", "logged"),
    [("GET", 200, 1.0, False), ("GET", 200, 120.0, True), ("HEAD", 500, 1.0, False), ("POST", 503, 0.1, True)],
)
def test_the_access_log_keeps_what_is_worth_reading(caplog, method, status, seconds, logged):
    log = FilteredAccessLogger(logging.getLogger("slime.test"), "")
    request = SimpleNamespace(method=method, path="/v1/messages", remote="127.0.0.1")
    with caplog.at_level(logging.INFO, "slime.test"):
        log.log(request, SimpleNamespace(status=status), seconds)
    assert bool(caplog.records) == logged
