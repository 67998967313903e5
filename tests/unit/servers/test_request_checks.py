"""Requests that a web page may have made a browser send, bodies that are no JSON, and bodies that grow."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from slime.servers import request_checks
from slime.servers.bounded_site import RUNNER_OPTIONS, BoundedSite
from slime.servers.request_checks import RequestError, browser_guard, decompressed, parse_json, read_json

LIMIT = 1 << 16
JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A server that answers with the JSON it is sent."""

    async def echo(request: web.Request) -> web.Response:
        try:
            return web.json_response(await read_json(request))
        except RequestError as e:
            return web.json_response(e.message, status=e.status)

    refuse = lambda status, message: web.json_response(message, status=status)
    app = web.Application(client_max_size=LIMIT, middlewares=[browser_guard(refuse)])
    app.router.add_route("*", "/", echo)
    runner = web.AppRunner(app, **RUNNER_OPTIONS)
    await runner.setup()
    await BoundedSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    await runner.cleanup()


async def send(url: str, body: bytes, headers: dict[str, str], method: str = "POST") -> tuple[int, object]:
    async with aiohttp.ClientSession() as session, session.request(method, url, data=body, headers=headers) as reply:
        return reply.status, await reply.json()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "application/vnd.api+json"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "text/plain; application/json"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=a"}, 415),
        ({"Content-Type": "text/plain", "Authorization": "Bearer a"}, 415),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "http://127.0.0.1"}, 403),  # another port
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8889", "Origin": "http://evil.example:8889"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "localhost:8889"}, 200),
        ({"Host": "[::1]:8889"}, 200),
        ({"Host": "host.docker.internal"}, 200),
        ({"Host": "10.1.2.3"}, 200),
        ({"Host": "[::1"}, 403),
    ],
)
async def test_requests_of_web_pages_are_refused(url, headers, status):
    assert (await send(url, b"{}", {**JSON, **headers}))[0] == status


async def test_the_own_page_may_send(url):
    assert await send(url, b"[1]", {**JSON, "Origin": url.rstrip("/")}) == (200, [1])


async def test_a_body_without_a_type_needs_a_token(url):
    async with aiohttp.ClientSession(skip_auto_headers=["Content-Type"]) as session:
        for headers, status in (({}, 415), ({"Authorization": "Bearer a"}, 200)):
            async with session.post(url, data=b"{}", headers=headers) as reply:
                assert reply.status == status


@pytest.mark.parametrize(("allowed", "status"), [("", 403), ("gateway.example.org", 200), ("a, *", 200), ("a.b", 403)])
async def test_names_of_tunnels_are_allowed_by_a_variable(url, monkeypatch, allowed, status):
    monkeypatch.setenv(request_checks.HOSTS_VARIABLE, allowed)
    assert (await send(url, b"{}", {**JSON, "Host": "gateway.example.org:443"}))[0] == status


BODIES = [
    b"", b"{", b"nan", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}', b'{"a": 1e400}', b'{"a": "\\ud800"}',
    b'{"a": "\\udc00\\ud800"}', b"\xff\xfe", b'"\x80"', b"[" * 5000, b"[" * 2000 + b"]" * 2000, 
    b'{"a":' * 200 + b"1" + b"}" * 200,
    b"[" * 102 + b"]" * 102, b"{} {}", b"\x80\x04\x95", b"{'a': 1}", b'{"a": 01}', b'{"a": 1,}', b"\xef\xbb\xbf{}",
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
async def test_what_is_no_strict_json_is_a_400(url, body):
    status, message = await send(url, body, JSON)
    assert (status, "not JSON" in str(message)) == (400, True)


def test_depth_is_counted_whatever_the_width():
    assert parse_json(b"[" * 101 + b"]" * 101)
    assert len(parse_json(b"[" + b"[],{}," * 5000 + b"1]")) == 10001
    with pytest.raises(RequestError, match="deeper than 100"):
        parse_json(b'{"a":[' * 51 + b"1" + b"]}" * 51)


PLAIN = json.dumps({"text": "abc" * 1000}).encode()
RAW = zlib.compressobj(wbits=-15)
RAW_DEFLATE = RAW.compress(PLAIN) + RAW.flush()


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(PLAIN)), ("x-gzip", gzip.compress(PLAIN)), ("deflate", zlib.compress(PLAIN)),
        ("deflate", RAW_DEFLATE), ("identity", PLAIN), ("GZIP", gzip.compress(PLAIN)),
    ],
)  # fmt: skip
async def test_compressed_bodies_are_read(url, encoding, body):
    status, found = await send(url, body, {**JSON, "Content-Encoding": encoding})
    assert (status, found) == (200, json.loads(PLAIN))


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("gzip", PLAIN * 20, 400),
        ("deflate", PLAIN * 20, 400),
        ("gzip", b"", 400),
        ("gzip", gzip.compress(PLAIN)[:-9], 400),
        ("deflate", zlib.compress(PLAIN)[:-9], 400),
        ("gzip", gzip.compress(PLAIN) + b"more", 400),
        ("br", PLAIN, 415),
        ("zstd", PLAIN, 415),
        ("gzip, gzip", PLAIN, 415),
        ("gzip", gzip.compress(b" " * (100 << 20)), 413),
        ("deflate", zlib.compress(b"[" * (20 << 20)), 413),
        ("identity", b" " * (LIMIT + 1), 413),
    ],
    ids=str,
)
async def test_what_is_not_as_its_encoding_says_or_too_large_is_refused_at_once(url, encoding, body, status):
    async with asyncio.timeout(20):
        assert (await send(url, body, {**JSON, "Content-Encoding": encoding}))[0] == status


def test_a_bomb_is_not_unpacked():
    bomb = gzip.compress(b"0" * (50 << 20))
    with pytest.raises(RequestError, match="larger than 1000 bytes when it is decompressed") as caught:
        decompressed(bomb, "gzip", 1000)
    assert caught.value.status == 413


async def test_a_body_that_does_not_come_is_given_up(url, monkeypatch):
    monkeypatch.setattr(request_checks, "BODY_DEADLINE_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1].strip("/")))
    head = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    writer.write(head)
    async with asyncio.timeout(20):
        assert b"408" in await reader.readline()
    writer.close()


@pytest.mark.parametrize("options", [RUNNER_OPTIONS, {}])
@pytest.mark.parametrize(("encoding", "body", "status"), [("gzip", PLAIN, 400), ("gzip", gzip.compress(PLAIN), 200)])
async def test_a_server_of_the_users_own_reads_compressed_bodies_too(options, encoding, body, status):
    """Its runner decompresses before."""

    async def echo(request: web.Request) -> web.Response:
        try:
            return web.json_response(await read_json(request))
        except RequestError as e:
            return web.json_response(e.message, status=e.status)

    app = web.Application(client_max_size=LIMIT)
    app.router.add_post("/", echo)
    runner = web.AppRunner(app, **options)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        assert (await send(url, body, {**JSON, "Content-Encoding": encoding}))[0] == status
    finally:
        await runner.cleanup()


RAW_REQUESTS = [
    b"GARBAGE\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00" * 30 + b"\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nzz\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Type: ;;;\r\nContent-Length: 2\r\n\r\n{}",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n" + b"".join(b"X%d: a\r\n" % n for n in range(5000)) + b"\r\n",
    b"GET http://[::1/ HTTP/1.1\r\nHost: a\r\n\r\n",
]


@pytest.mark.parametrize("raw", RAW_REQUESTS, ids=range(len(RAW_REQUESTS)))
async def test_what_is_no_http_is_refused_without_a_traceback(url, caplog, raw):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1].strip("/")))
    writer.write(raw)
    async with asyncio.timeout(20):
        assert (await reader.readline()).split()[1][:1] == b"4"
    writer.close()
    assert [record for record in caplog.records if record.exc_info] == []


async def test_a_request_without_a_host_is_of_no_browser(url):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1].strip("/")))
    writer.write(b"POST / HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
    async with asyncio.timeout(20):
        assert b"200" in await reader.readline()
    writer.close()
