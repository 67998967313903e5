"""Server-sent events: the latest at hand, what is no event, and every way an answer can end."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp
import pytest

from slime.servers import http_client
from slime.servers.http_client import HttpClient
from slime.servers.http_replies import HttpRequestError, HttpTimeoutError, LatestEvents, StreamLostError
from tests.support.standin import Failure, StandInCluster

REQUEST = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 8}, "return_logprob": True}


class Pieces:
    """Body of an open answer: these pieces, then its end or an error."""

    def __init__(self, *pieces: bytes | Exception) -> None:
        self.pieces = list(pieces)
        self.method, self.url, self.content = "POST", "http://engine/generate", self
        self.closed = self.released = False

    async def readany(self) -> bytes:
        piece = self.pieces.pop(0) if self.pieces else b""
        if isinstance(piece, Exception):
            raise piece
        return piece

    def release(self) -> None:
        self.released = True

    def close(self) -> None:
        self.closed = True


async def read(*pieces: bytes | Exception) -> tuple[list[Any], LatestEvents]:
    events = LatestEvents(Pieces(*pieces), 5.0)
    return [event async for event in events], events


@pytest.mark.parametrize(
    ("pieces", "seen"),
    [
        ([b'data: {"a":1}\n\n', b'data: {"a":2}\n\ndata: [DONE]\n\n'], [{"a": 1}, {"a": 2}]),
        ([b'da', b'ta: {"a"', b':1}', b'\n', b'\ndata: [DONE]\n\n'], [{"a": 1}]),
        ([b'data: {"a":1}\n\ndata: {"a":2}\n\ndata: {"a":3}\n\n', b"data: [DONE]\n\n"], [{"a": 3}]),
        ([b'data:{"a":1}\r\n\r\n', b": ping\r\n\r\nevent: end\r\ndata: [DONE]\r\n\r\n"], [{"a": 1}]),
        ([b'data: "\xc3', b'\xa9"\n\ndata: [DONE]\n'], ["é"]),
        ([b"data: [DONE]\n\n"], []),
    ],
)  # fmt: skip
async def test_of_the_events_at_hand_the_latest(pieces, seen, caplog):
    found, events = await read(*pieces)
    assert found == seen
    assert events.ended
    assert not caplog.records


async def test_lines_that_are_no_json_are_skipped_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        found, _ = await read(b'data: {"a":1}\n\ndata: {"a":\n\nhello\n', b'data: {"a":2}\n\n', b"data: [DONE]\n\n")
    assert found == [{"a": 1}, {"a": 2}]
    assert ["no JSON" in r.getMessage() for r in caplog.records].count(True) == 1
    assert "hello" in caplog.text


async def test_an_error_ends_the_answer_with_the_engines_words():
    with pytest.raises(HttpRequestError, match="context length") as caught:
        await read(b'data: {"error":{"message":"longer than the context length","code":400}}\n\ndata: [DONE]\n\n')
    assert caught.value.status == 400


async def test_an_error_that_says_later_is_a_lost_answer():
    with pytest.raises(StreamLostError, match="shutting down") as caught:
        await read(b'data: {"error":{"message":"shutting down","code":503}}\n\ndata: [DONE]\n\n')
    assert caught.value.status == 503


@pytest.mark.parametrize("end", [[], [aiohttp.ClientPayloadError("cut")], [ConnectionResetError("reset")]])
async def test_a_connection_that_ends_first_has_lost_the_answer(end):
    with pytest.raises(StreamLostError, match=r"ended before its answer did|broke off .*(cut|reset)"):
        await read(b'data: {"a":1}\n\n', *end)


async def test_trouble_after_the_end_is_none():
    found, events = await read(b'data: {"a":1}\n\ndata: [DONE]\n\n', aiohttp.ClientPayloadError("cut"))
    assert (found, events.ended, events._reply.closed) == ([{"a": 1}], True, True)


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(http_client, "BACKOFF_BASE_S", 0.01)
    monkeypatch.setattr(http_client, "WORKER_LIST_AGE_S", 0.0)
    with StandInCluster(1) as running:
        running.engines[0].reply = lambda ids, params: [97, 98, 99, 100]
        yield running


@pytest.fixture
async def client():
    one = HttpClient(16, request_timeout=10.0)
    yield one
    await one.close()


async def texts(client: HttpClient, url: str, **options: Any) -> list[str]:
    async with client.stream(f"{url}/generate", REQUEST, **options) as events:
        return [event["text"] async for event in events]


@pytest.mark.parametrize("through", ["engine", "router"])
async def test_a_whole_answer_is_read_and_its_connection_used_again(cluster, client, through):
    engine = cluster.engines[0]
    url = engine.url if through == "engine" else cluster.router.url
    engine.delay = 0.02
    for _ in range(2):
        seen = await texts(client, url)
        assert seen[-1] == "abcd"
        assert all("abcd".startswith(text) for text in seen)
    connector = (await client._session("POST", url)).connector
    assert len(connector._acquired) == 0
    assert sum(len(free) for free in connector._conns.values()) == 1
    assert engine.aborts == []
    assert all(request["stream"] is True for request in engine.requests)


async def test_what_fails_before_the_first_event_is_asked_again(cluster, client):
    cluster.engines[0].failures.extend([Failure(503, b"busy"), Failure(cut=True)])
    assert (await texts(client, cluster.engines[0].url))[-1] == "abcd"
    assert len({request["rid"] for request in cluster.engines[0].requests}) == 3


async def test_a_refusal_is_final(cluster, client):
    cluster.engines[0].failures.append(Failure(400, b"too long"))
    with pytest.raises(HttpRequestError, match="too long"):
        await texts(client, cluster.engines[0].url)
    assert len(cluster.engines[0].requests) == 1


async def test_an_event_that_does_not_come_ends_at_its_deadline_and_is_aborted(cluster, client):
    cluster.engines[0].delay = 60.0
    with pytest.raises(HttpTimeoutError, match=r"sent nothing for 0\.3 s"):
        await texts(client, cluster.router.url, timeout=0.3)
    await client.drain_aborts()
    assert [abort["rid"] for abort in cluster.engines[0].aborts] == [cluster.engines[0].requests[0]["rid"]]


async def test_an_answer_that_is_left_is_aborted_on_the_engine(cluster, client):
    engine = cluster.engines[0]
    engine.delay = 0.05
    async with client.stream(f"{cluster.router.url}/generate", REQUEST) as events:
        async for _ in events:
            break
    await client.drain_aborts()
    assert [abort["rid"] for abort in engine.aborts] == [engine.requests[0]["rid"]]
    cluster.wait_until(lambda: not engine.running, "the engine gives the request up")


async def test_a_cancelled_reader_aborts_too(cluster, client):
    engine = cluster.engines[0]
    engine.delay = 60.0
    task = asyncio.create_task(texts(client, cluster.router.url))
    while not engine.running:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.drain_aborts()
    assert len(engine.aborts) == 1
