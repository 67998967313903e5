"""The run's key goes to the run's servers with every HTTP client, and to no other server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from slime.servers.http_client import HttpClient
from slime.utils import run_key

KEY = "the-key-of-the-run"


class Server(ThreadingHTTPServer):
    """Notes what ``Authorization`` it gets; ``/to/<address>`` redirects there."""

    def __init__(self) -> None:
        seen: list[str | None] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if length := int(self.headers.get("Content-Length") or 0):
                    self.rfile.read(length)
                seen.append(self.headers.get("Authorization"))
                if self.path.startswith("/to/"):
                    self.send_response(307)
                    self.send_header("Location", f"http://{self.path.removeprefix('/to/')}")
                    body = b""
                else:
                    self.send_response(200)
                    self.send_header("Content-Type", "application/json")
                    body = b'{"object": "list", "data": []}'
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *args: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.seen = seen
        self.address = f"127.0.0.1:{self.server_port}"


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    both = Server(), Server()
    for server in both:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield both
    for server in both:
        server.shutdown()
        server.server_close()


CLIENTS = {
    "aiohttp": """
        import asyncio, aiohttp
        async def ask():
            async with aiohttp.ClientSession() as session:
                async with session.post(url, json={"a": 1}, headers=headers) as reply:
                    await reply.read()
        asyncio.run(ask())
    """,
    "httpx": """
        import httpx
        httpx.post(url, json={"a": 1}, headers=headers, follow_redirects=True)
    """,
    "httpx, asynchronous": """
        import asyncio, httpx
        async def ask():
            async with httpx.AsyncClient(follow_redirects=True) as client:
                await client.post(url, json={"a": 1}, headers=headers)
        asyncio.run(ask())
    """,
    "requests": """
        import requests
        requests.post(url, json={"a": 1}, headers=headers)
    """,
    "a session of requests": """
        import requests
        with requests.Session() as session:
            session.headers.update(headers)
            session.get(url)
    """,
    "urllib": """
        import urllib.request
        urllib.request.urlopen(urllib.request.Request(url, headers=headers)).read()
    """,
    "openai": """
        import openai
        openai.OpenAI(base_url=url, api_key="EMPTY").models.list()
    """,
}


def run(code: str, url: str, key_of: str, *, env: dict[str, str] | None = None, headers: dict[str, str]) -> None:
    """Run a client in a process of its own, in which the key is sent to ``key_of``."""
    start = f"""
        from slime.utils import run_key
        run_key.add("http://{key_of}", {KEY!r})
        run_key.install()
        run_key.install()
        url, headers = {url!r}, {headers!r}
    """
    script = textwrap.dedent(start) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
def test_the_key_goes_to_the_runs_server_only(client: str, servers: tuple[Server, Server]) -> None:
    own, other = servers
    stand_in = {"Authorization": "Bearer EMPTY"}
    both = f"""
        for url in ["http://{own.address}/x", "http://{other.address}/x", "http://{own.address}/to/{other.address}/y"]:
            for headers in ({{}}, {stand_in!r}):
        {textwrap.indent(textwrap.dedent(CLIENTS[client]), "                ")}
    """
    if client in ("urllib", "openai"):  # urllib sends no 307 on with a body, and openai asks below its base
        both = both.replace(f', "http://{own.address}/to/{other.address}/y"', "")
    run(textwrap.dedent(both), "", own.address, headers={})
    assert own.seen
    assert set(own.seen) == {f"Bearer {KEY}"}
    assert other.seen
    assert set(other.seen) <= {None, "Bearer EMPTY"}
    assert len(other.seen) == (2 if client in ("urllib", "openai") else 4)


@pytest.mark.slow
@pytest.mark.parametrize("client", ["aiohttp", "httpx", "requests", "a session of requests", "urllib"])
def test_a_call_with_the_second_key_keeps_it(client: str, servers: tuple[Server, Server]) -> None:
    own, _ = servers
    code = f"run_key.add('http://{own.address}', {KEY!r}, 'the-second-key')\n{textwrap.dedent(CLIENTS[client])}"
    run(code, f"http://{own.address}/x", own.address, headers={"Authorization": "Bearer the-second-key"})
    run(code, f"http://{own.address}/x", own.address, headers={"Authorization": "Bearer another"})
    assert own.seen == ["Bearer the-second-key", f"Bearer {KEY}"]


def test_a_redirect_of_urllib_does_not_take_the_key_along(servers: tuple[Server, Server]) -> None:
    own, other = servers
    code = CLIENTS["urllib"].replace("Request(url, headers=headers)", "Request(url)")
    run(code, f"http://{own.address}/to/{other.address}/y", own.address, headers={})
    assert own.seen == [f"Bearer {KEY}"]
    assert other.seen == [None]


@pytest.mark.slow
@pytest.mark.parametrize("client", ["httpx", "requests", "urllib"])
def test_a_proxy_does_not_get_the_key(client: str, servers: tuple[Server, Server]) -> None:
    proxy, _ = servers
    import os

    env = {**os.environ, "http_proxy": f"http://{proxy.address}", "no_proxy": "", "NO_PROXY": ""}
    run(CLIENTS[client], "http://192.0.2.1:15000/x", "192.0.2.1:15000", env=env, headers={})
    assert proxy.seen == [None]


def test_slimes_own_client_sends_it_to_engines_that_are_not_registered(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = servers
    monkeypatch.setattr(run_key, "_keys", {})
    monkeypatch.setattr(run_key, "_others", {})
    run_key.add(f"http://{own.address}", KEY, "second")

    async def ask() -> None:
        client = HttpClient(1)
        for server in servers:
            assert json.loads(json.dumps(await client.get(f"http://{server.address}/x")))["data"] == []
        await client.post(f"http://{own.address}/abort_request", {"rid": "1"})
        await client.close()

    asyncio.run(ask())
    assert own.seen == [f"Bearer {KEY}", "Bearer second"]
    assert other.seen == [None]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (("http", "fd00::1", 15000), KEY),
        (("http", "[fd00::1]", 15000), KEY),
        (("https", "fd00::1", 15000), None),
        (("http", "fd00::1", 15001), None),
        (("http", "fd00::2", 15000), None),
        (("http", None, None), None),
    ],
)
def test_a_server_is_known_by_host_and_port(asked: Any, found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_key, "_keys", {})
    run_key.add("http://[fd00::1]:15000", KEY)
    run_key.add("http://fd00-without-a-port", KEY)
    assert run_key.key_for(*asked) == found


def test_a_server_that_has_ended_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_key, "_keys", {})
    monkeypatch.setattr(run_key, "_others", {})
    for port in (15000, 15001):
        run_key.add(f"http://[fd00::1]:{port}", KEY, "second")
    before = run_key.version()
    run_key.forget("http://[fd00::1]:15000")
    run_key.forget("http://never-known:1")
    assert run_key.version() > before
    assert run_key.key_for("http", "fd00::1", 15000) is run_key.control_key_for("fd00::1", 15000) is None
    assert (run_key.key_for("http", "fd00::1", 15001), run_key.control_key_for("fd00::1", 15001)) == (KEY, "second")


@pytest.mark.parametrize("text", ["[1]", "not JSON", '"x"'])
def test_keys_of_other_servers_that_cannot_be_read(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_SERVER_KEYS", text)
    with pytest.raises(ValueError, match="SLIME_SERVER_KEYS is no JSON object"):
        run_key._given()


def test_keys_of_other_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIME_SERVER_KEYS", raising=False)
    assert list(run_key._given()) == []
    monkeypatch.setenv("SLIME_SERVER_KEYS", '{"http://judge:30000": "k"}')
    assert list(run_key._given()) == [("http://judge:30000", "k")]
