"""Streams of all protocols: their grammar, what keeps them alive, and how they end when a turn fails."""

from __future__ import annotations

import asyncio
import functools
import json
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter, event_stream, http_requests
from slime.agent.adapters.common import Reply
from slime.agent.adapters.provider import ParsedRequest, ProviderFormat
from slime.agent.adapters.responses import ResponsesFormat
from slime.utils.types import Sample
from tests.support.agents import ToolTokenizer, call_text, gateway
from tests.support.event_grammar import events_of, read_chat, read_messages, read_responses
from tests.support.standin import Failure

pytestmark = pytest.mark.slow

BASE = Sample(index=1, group_index=0)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
QUESTION = [{"role": "user", "content": "q"}]
PROTOCOLS: dict[str, Any] = {
    "messages": (
        AnthropicAdapter, read_messages,
        {"messages": QUESTION, "max_tokens": 90, "tools": [{"name": "add", "input_schema": PARAMETERS}]},
    ),
    "chat/completions": (
        OpenAIAdapter, read_chat,
        {"messages": QUESTION, "tools": [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]},
    ),
    "responses": (
        OpenAIAdapter, read_responses,
        {"input": "q", "tools": [{"type": "function", "name": "add", "parameters": PARAMETERS}]},
    ),
}  # fmt: skip


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> SimpleNamespace:
    kind, read, body = PROTOCOLS[request.param]
    return SimpleNamespace(path=f"/v1/{request.param}", kind=kind, read=read, body={"model": "m", **body})


async def post(g: SimpleNamespace, protocol: SimpleNamespace, **more: Any) -> tuple[int, str]:
    headers = {"Authorization": "Bearer s"}
    async with aiohttp.ClientSession(headers=headers) as client:
        async with client.post(g.url + protocol.path, json={**protocol.body, **more}) as reply:
            return reply.status, await reply.text()


def formats() -> list[tuple[ProviderFormat, Any]]:
    options = {"tokenizer": ToolTokenizer(), "sglang_url": "http://nowhere"}
    return [
        (AnthropicAdapter(**options), read_messages),
        (OpenAIAdapter(**options), read_chat),
        (ResponsesFormat(), read_responses),
    ]


FORMATS = formats()
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
uses = st.fixed_dictionaries(
    {"name": st.sampled_from(["add", "patch"]), "input": st.dictionaries(texts, texts | st.integers(), max_size=2)}
)


@settings(max_examples=150, deadline=None)
@given(texts, texts, st.lists(uses, max_size=3), st.sampled_from(["stop", "length"]))
def test_every_answer_is_a_stream_that_says_the_same(reasoning, text, tool_uses, finish):
    reply = Reply(reasoning, text, tool_uses, "tool_calls" if tool_uses else finish, 3, 4)
    for api, read in FORMATS:
        asked = ParsedRequest({"model": "m", "tools": [{"type": "custom", "name": "patch"}]}, 3)
        message = api.reply_message(reply, asked.body)
        body = api.reply_body(message, reply, asked)
        body = json.loads(json.dumps(body))
        raw = b"".join([*api.opening_events(asked), api.keep_alive(asked), *api.reply_events(body, asked)]).decode()
        events, idle = events_of(raw)
        assert idle == 1
        found = read(events)
        if read is read_chat:
            [choice] = body["choices"]
            calls = [{k: v for k, v in c.items() if k != "index"} for c in found.get("tool_calls", [])]
            assert (found["content"], calls) == (
                choice["message"]["content"] or "",
                choice["message"].get("tool_calls", []),
            )
            assert (found["finish_reason"], found["usage"]) == (choice["finish_reason"], body["usage"])
        else:
            assert found == body
        asked = ParsedRequest(asked.body, 3)
        failed = b"".join([*api.opening_events(asked), api.error_event("api_error", "no", asked)]).decode()
        assert read(events_of(failed)[0])["error"]["message"] == "no"
        assert api.translate_reply(message)["role"] == "assistant"


async def test_a_stream_that_takes_long_is_opened_and_kept_alive(protocol, monkeypatch):
    monkeypatch.setattr(http_requests, "CLIENT_POLL_S", 0.02)
    monkeypatch.setattr(event_stream, "OPEN_AFTER_S", 0.05)
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.1)
    with gateway(protocol.kind, call_text("add", {"a": 1}), seconds=0.8) as g:
        status, raw = await post(g, protocol, stream=True)
        events, idle = events_of(raw)
        assert status == 200
        assert 2 <= idle <= 8
        assert protocol.read(events)
        [sample] = await g.adapter.finish_session("s", base_sample=BASE)
        assert sample.metadata["use_tool"]


async def test_a_turn_that_fails_soon_has_a_status_and_later_an_event(protocol, monkeypatch):
    monkeypatch.setattr(http_requests, "CLIENT_POLL_S", 0.02)
    with gateway(protocol.kind, "x", seconds=3600.0) as g:
        long = (
            b'{"error":{"message":"The input (900 tokens) is longer than the model\'s context length (512 tokens)."}}'
        )
        g.engine.failures.append(Failure(400, long))
        status, raw = await post(g, protocol, stream=True)
        assert status == 400
        error = json.loads(raw)["error"]
        assert (error["type"], error["message"]) == (
            "invalid_request_error", "prompt is too long: 900 tokens > 512 maximum",
        )  # fmt: skip
        assert error.get("code") == (None if protocol.kind is AnthropicAdapter else "context_length_exceeded")
        monkeypatch.setattr(event_stream, "OPEN_AFTER_S", 0.0)
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer s"}) as client:
            async with client.post(g.url + protocol.path, json={**protocol.body, "stream": True}) as reply:
                begun = (await reply.content.readuntil(b"\n\n")).decode()  # while the engine is at work
                assert await g.adapter.finish_session("s", base_sample=BASE, wait_timeout=0) == []
                raw = begun + (await reply.content.read()).decode()
        found = protocol.read(events_of(raw)[0])
        assert found["error"]["message"] == "session closed"
        if protocol.read is read_responses:
            assert (found["status"], found["error"]["code"]) == ("failed", "server_is_overloaded")


@pytest.mark.parametrize("broken", ["write", "write_eof"])
async def test_a_client_that_leaves_during_the_last_events_gets_no_other_answer(monkeypatch, broken):
    async def gone(*_: object) -> None:
        raise ConnectionResetError("Cannot write to closing transport")

    stream = event_stream.EventStream(make_mocked_request("POST", "/"), FORMATS[0][0], ParsedRequest({"model": "m"}, 3))
    monkeypatch.setattr(web.StreamResponse, broken, gone)
    assert await stream.end([b"x"]) is stream.response
    assert stream.is_open


async def test_a_client_that_leaves_an_open_stream_is_not_recorded(protocol, monkeypatch):
    monkeypatch.setattr(http_requests, "CLIENT_POLL_S", 0.02)
    monkeypatch.setattr(event_stream, "OPEN_AFTER_S", 0.0)
    with gateway(protocol.kind, "x", seconds=3600.0) as g:
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer s"}) as client:
            async with client.post(g.url + protocol.path, json={**protocol.body, "stream": True}) as reply:
                await reply.content.readuntil(b"\n\n")
                reply.close()
        # in a thread: the connection is closed by this event loop, which must not be kept
        wait_until = functools.partial(asyncio.to_thread, g.cluster.wait_until)
        await wait_until(lambda: not g.engine.running, "the request is aborted", 30)
        await wait_until(lambda: g.adapter.inflight.count("s") == 0, "the turn has ended", 30)
        assert g.adapter.manager.turn_count("s") == 0
