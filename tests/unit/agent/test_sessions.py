"""The life of a session: who may come in, what is recorded, what ends it, what happens when something breaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter, common
from slime.agent.trajectory import TurnRecord
from slime.servers import http_utils
from slime.utils.types import Sample
from tests.support.agents import END, ToolTokenizer, served, trained_text
from tests.support.standin import Failure, StandInCluster

BASE = Sample(index=1, group_index=0)
HEADERS = {"Authorization": "Bearer s"}


@pytest.fixture
def cluster() -> Iterator[StandInCluster]:
    with StandInCluster(1, reply=lambda ids, params: [ord(c) for c in f"ok{END}"]) as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        yield session


@pytest.fixture
def gateway(cluster: StandInCluster) -> Iterator[Any]:
    """``start(**options)``: a gateway in front of the cluster, on a thread."""
    running = []

    def start(kind: type = OpenAIAdapter, **options: Any) -> SimpleNamespace:
        adapter = kind(tokenizer=ToolTokenizer(), sglang_url=cluster.router.url, **options)
        running.append(served(adapter))
        handle = running[-1].__enter__()
        path = "messages" if kind is AnthropicAdapter else "chat/completions"
        return SimpleNamespace(adapter=adapter, url=f"http://127.0.0.1:{handle.port}/v1/{path}", handle=handle)

    yield start
    for context in running:
        context.__exit__(None, None, None)


async def ask(client: aiohttp.ClientSession, url: str, text: str = "q", **body: Any) -> tuple[int, dict[str, Any]]:
    async with client.post(url, json={"messages": [{"role": "user", "content": text}], **body}) as reply:
        return reply.status, await reply.json()


async def until(cluster: StandInCluster, condition: Any) -> None:
    await asyncio.to_thread(cluster.wait_until, condition, "what the test waits for", 60)


def replace_engine(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    monkeypatch.setattr(common, "call_sglang_generate", function)


async def test_a_patched_engine_is_used(gateway, client, monkeypatch):
    calls = []

    async def mine(prompt_ids, session, body, *, adapter, session_id=None):
        calls.append((session, body["model"], adapter, session_id))
        return TurnRecord(prompt_ids, [ord(c) for c in "mine" + END], "stop", [-1.0] * 5)

    replace_engine(monkeypatch, mine)
    g = gateway()
    g.adapter.open_session("s", sampling_defaults={"temperature": 0}, max_context_tokens=100)
    status, body = await ask(client, g.url, model="m")
    assert (status, body["choices"][0]["message"]["content"]) == (200, "mine")
    assert calls == [(common.Session({"temperature": 0}, 100), "m", g.adapter, "s")]
    [sample] = await g.adapter.finish_session("s", base_sample=BASE)
    assert sample.rollout_log_probs == [-1.0] * 5


async def test_a_session_is_opened_once_and_closed_for_good(gateway, client):
    g = gateway()
    g.adapter.open_session("s")
    with pytest.raises(ValueError, match="session 's' is open already; every session needs an id of its own"):
        g.adapter.open_session("s")
    assert (await ask(client, g.url))[0] == 200
    assert len(await g.adapter.finish_session("s", base_sample=BASE)) == 1
    status, body = await ask(client, g.url)
    assert (status, body["error"]["message"]) == (503, "session closed")
    assert await g.adapter.finish_session("s", base_sample=BASE) == []
    g.adapter.open_session("s")  # a group that begins again has the same ids
    assert (await ask(client, g.url))[0] == 200
    await g.adapter.drop_session("s")
    assert (await ask(client, g.url))[0] == 503
    assert not g.adapter.manager.has_session("s")
    assert g.adapter.store == {}


async def test_closed_sessions_are_not_kept_forever(gateway, monkeypatch):
    monkeypatch.setattr(common, "CLOSED_SIDS_KEPT", 3)
    adapter = gateway().adapter
    for number in range(5):
        await adapter.drop_session(str(number))
    assert list(adapter.closed) == ["2", "3", "4"]


@pytest.mark.parametrize(
    ("kind", "error_of"), [(OpenAIAdapter, lambda body: body["error"]), (AnthropicAdapter, lambda body: body["error"])]
)
async def test_the_turns_of_a_session_are_capped(gateway, client, kind, error_of):
    g = gateway(kind, max_turns_per_sid=2)
    g.adapter.open_session("s")
    statuses = [(await ask(client, g.url, str(i)))[0] for i in range(2)]
    status, body = await ask(client, g.url)
    assert ([*statuses, status], error_of(body)["type"]) == ([200, 200, 429], "rate_limit_error")
    assert "has had its 2 turns" in error_of(body)["message"]
    assert g.adapter.manager.turn_count("s") == 2


async def test_turns_in_flight_count_for_the_cap(gateway, client, monkeypatch):
    began, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    async def slow(prompt_ids, session, body, *, adapter, session_id=None):
        loop.call_soon_threadsafe(began.set)
        await asyncio.to_thread(go_on.wait, 20)
        return TurnRecord(prompt_ids, [1], "stop", [0.0])

    replace_engine(monkeypatch, slow)
    g = gateway(max_turns_per_sid=1)
    g.adapter.open_session("s")
    first = asyncio.create_task(ask(client, g.url))
    await began.wait()
    assert (await ask(client, g.url))[0] == 429
    go_on.set()
    assert (await first)[0] == 200


async def test_finishing_waits_for_the_turns_in_flight(gateway, client, monkeypatch):
    began, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    async def slow(prompt_ids, session, body, *, adapter, session_id=None):
        loop.call_soon_threadsafe(began.set)
        await asyncio.to_thread(go_on.wait, 20)
        return TurnRecord(prompt_ids, [1], "stop", [0.0])

    replace_engine(monkeypatch, slow)
    g = gateway()
    g.adapter.open_session("s")
    turn = asyncio.create_task(ask(client, g.url))
    await began.wait()
    finish = asyncio.create_task(g.adapter.finish_session("s", base_sample=BASE, wait_timeout=60))
    async with asyncio.timeout(60):
        while "s" not in g.adapter.closed:
            await asyncio.sleep(0)
    assert (await ask(client, g.url))[0] == 503  # no new ones meanwhile
    go_on.set()
    assert len(await finish) == 1
    assert (await turn)[0] == 200


async def test_turns_that_take_too_long_are_cut_off_and_aborted(gateway, client, cluster):
    engine = cluster.engines[0]
    engine.duration = lambda ids: 3600.0
    g = gateway()
    g.adapter.open_session("s")
    turn = asyncio.create_task(ask(client, g.url))
    await until(cluster, lambda: bool(engine.running))
    assert await g.adapter.finish_session("s", base_sample=BASE, wait_timeout=0.01) == []
    status, body = await turn
    assert (status, body["error"]["message"]) == (503, "session closed")
    await until(cluster, lambda: not engine.running)
    assert [abort["rid"] for abort in engine.aborts] == [engine.requests[0]["rid"]]


async def test_a_client_that_leaves_is_not_recorded_and_its_request_is_aborted(gateway, client, cluster):
    engine = cluster.engines[0]
    engine.duration = lambda ids: 3600.0
    g = gateway()
    g.adapter.open_session("s")
    turn = asyncio.create_task(ask(client, g.url))
    await until(cluster, lambda: bool(engine.running))
    turn.cancel()
    await until(cluster, lambda: not engine.running)
    assert await g.adapter.finish_session("s", base_sample=BASE, wait_timeout=60) == []


async def test_a_client_that_leaves_is_noticed_where_handlers_are_not_cancelled(cluster, monkeypatch):
    """As in applications that users serve themselves."""
    monkeypatch.setattr("slime.agent.adapters.http_requests.CLIENT_POLL_S", 0.01)
    engine = cluster.engines[0]
    engine.duration = lambda ids: 3600.0
    statuses: list[int] = []
    adapter = OpenAIAdapter(tokenizer=ToolTokenizer(), sglang_url=cluster.router.url)
    adapter.open_session("s")

    @aiohttp.web.middleware
    async def note(request: Any, handler: Any) -> Any:
        response = await handler(request)
        statuses.append(response.status)
        return response

    adapter.app.middlewares.append(note)
    runner = aiohttp.web.AppRunner(adapter.app, handler_cancellation=False)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/chat/completions"
    async with aiohttp.ClientSession(headers=HEADERS) as client:
        turn = asyncio.create_task(ask(client, url))
        await until(cluster, lambda: bool(engine.running))
        turn.cancel()
        await asyncio.wait({turn})
    await until(cluster, lambda: not engine.running)
    await until(cluster, lambda: adapter.inflight.count("s") == 0)
    assert adapter.manager.turn_count("s") == 0
    await runner.cleanup()
    assert statuses == [499]
    await http_utils.get_http_client().close()


async def test_parallel_turns_of_many_sessions_do_not_mix(gateway, cluster):
    g = gateway()
    g_sids = [f"s{i}" for i in range(8)]
    for sid in g_sids:
        g.adapter.open_session(sid)
    async with aiohttp.ClientSession() as session:

        async def one(sid: str, text: str) -> int:
            body = {"messages": [{"role": "user", "content": f"{sid} {text}"}]}
            async with session.post(g.url, json=body, headers={"Authorization": f"Bearer {sid}"}) as reply:
                return reply.status

        statuses = await asyncio.gather(*(one(sid, text) for sid in g_sids for text in "abc"))
    assert statuses == [200] * 24
    for sid in g_sids:
        samples = await g.adapter.finish_session(sid, base_sample=BASE)
        assert len(samples) == 3
        texts = sorted("".join(map(chr, sample.tokens)) for sample in samples)
        assert all(f"{sid} {text}{END}" in whole for text, whole in zip("abc", texts, strict=True))
        assert all(trained_text(sample) == [f"ok{END}"] for sample in samples)


async def test_sessions_that_end_at_any_moment_leave_nothing_behind(gateway, cluster):
    """From another thread than turns are answered on."""
    g = gateway()
    statuses = []

    async def one(session: aiohttp.ClientSession, sid: str) -> None:
        body = {"messages": [{"role": "user", "content": sid}]}
        async with session.post(g.url, json=body, headers={"Authorization": f"Bearer {sid}"}) as reply:
            statuses.append(reply.status)

    async with aiohttp.ClientSession() as session:
        for number in range(60):
            sid = f"s{number}"
            g.adapter.open_session(sid)
            turn = asyncio.create_task(one(session, sid))
            for _ in range(number % 12):
                await asyncio.sleep(0.001)
            samples = await g.adapter.finish_session(sid, base_sample=BASE)
            await turn
            assert (statuses[-1], len(samples)) in ((200, 1), (503, 0))
    assert (g.adapter.store, g.adapter.manager._roots, len(g.adapter.closed)) == ({}, {}, 60)


@pytest.mark.parametrize("kind", [OpenAIAdapter, AnthropicAdapter])
async def test_only_who_has_the_id_of_an_open_session_is_served(gateway, client, kind):
    """On this host too: the agents of other sessions, and whoever else is there, know no id."""
    g = gateway(kind)
    g.adapter.open_session("other")
    for headers in ({}, {"Authorization": "Bearer s"}, {"X-Api-Key": "guessed"}):
        async with aiohttp.ClientSession() as session:
            async with session.post(g.url, json={"messages": [{"role": "user", "content": "q"}]}, headers=headers) as r:
                assert r.status == 401
    assert (list(g.adapter.store), g.adapter.manager.turn_count("s")) == (["other"], 0)


@pytest.mark.parametrize(("sid", "status"), [("s", 200), ("guessed", 401), ("default", 401)])
async def test_other_hosts_need_the_id_of_an_open_session(gateway, monkeypatch, sid, status):
    g = gateway()
    g.adapter.open_session("s")
    g.adapter.open_session("default")
    monkeypatch.setattr(common, "is_loopback", lambda host: False)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {sid}"}) as client:
        found, body = await ask(client, g.url)
    assert found == status
    if status == 401:
        assert body["error"]["message"] == "the token must be the id of an open session"


async def test_a_prompt_that_fills_the_context_is_not_sent(gateway, client, cluster):
    g = gateway()
    prompt = len(ToolTokenizer().apply_chat_template([{"role": "user", "content": "q"}], add_generation_prompt=True))
    g.adapter.open_session("s", max_context_tokens=prompt)
    status, body = await ask(client, g.url)
    assert (status, body["choices"][0]["finish_reason"], body["choices"][0]["message"]["content"]) == (
        200, "length", "",
    )  # fmt: skip
    assert cluster.requests == []
    assert g.adapter.manager.turn_count("s") == 1
    assert await g.adapter.finish_session("s", base_sample=BASE) == []


async def test_prompt_and_answer_together_stay_in_the_context(gateway, client, cluster):
    g = gateway()
    prompt = len(ToolTokenizer().apply_chat_template([{"role": "user", "content": "q"}], add_generation_prompt=True))
    g.adapter.open_session("s", max_context_tokens=prompt + 2)
    await ask(client, g.url)
    assert cluster.requests[0]["sampling_params"]["max_new_tokens"] == 2
    [sample] = await g.adapter.finish_session("s", base_sample=BASE)
    assert sample.metadata["truncated"]
    assert len(sample.tokens) == prompt + 2


async def test_engine_failures_reach_the_agent_with_their_reason(gateway, client, cluster, caplog):
    g = gateway()
    g.adapter.open_session("s")
    engine = cluster.engines[0]
    engine.failures.append(Failure(400, b'{"error":{"message":"too long for me"}}'))
    status, body = await ask(client, g.url)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert body["error"]["message"] == 'the engine refused the request: {"error":{"message":"too long for me"}}'
    engine.failures.append(Failure(500, b"boom"))
    status, body = await ask(client, g.url)
    assert (status, body["error"]["type"]) == (502, "api_error")
    assert cluster.router.url not in body["error"]["message"]
    assert f"{cluster.router.url}/generate was refused (status 500" in caplog.text
    engine.failures.append(Failure(503, b"busy"))  # tried again
    assert (await ask(client, g.url))[0] == 200
    assert g.adapter.manager.turn_count("s") == 1


async def test_a_turn_that_raises_is_an_error_of_the_server(gateway, client, monkeypatch, caplog):
    async def broken(*args, **kwargs):
        raise KeyError("what")

    replace_engine(monkeypatch, broken)
    g = gateway()
    g.adapter.open_session("s")
    status, body = await ask(client, g.url)
    assert (status, body["error"]["message"]) == (500, "KeyError: 'what'")
    assert "a turn failed" in caplog.text


async def test_messages_that_the_template_does_not_take_are_a_bad_request(gateway, client, monkeypatch, caplog):
    def picky(self, messages, **options):
        raise ValueError("roles must alternate")

    monkeypatch.setattr(ToolTokenizer, "apply_chat_template", picky)
    g = gateway()
    g.adapter.open_session("s")
    status, body = await ask(client, g.url)
    assert status == 400
    assert (
        "the chat template does not take these messages: ValueError: roles must alternate" in body["error"]["message"]
    )


async def test_the_debug_callback_sees_what_is_recorded(gateway, client, caplog):
    seen = []

    def look(sid, messages, tools, message, turn):
        seen.append((sid, messages, tools, message, "".join(map(chr, turn.output_ids))))
        raise RuntimeError("a mistake of the callback")

    g = gateway(debug_callback=look)
    g.adapter.open_session("s")
    assert (await ask(client, g.url))[0] == 200
    user, said = {"role": "user", "content": "q"}, {"role": "assistant", "content": "ok"}
    assert seen == [("s", [user], None, said, f"ok{END}")]
    assert "the debug_callback raised" in caplog.text
    assert g.adapter.manager.turn_count("s") == 1


async def test_the_engine_may_be_named_with_its_path(cluster, monkeypatch):
    adapter = OpenAIAdapter(tokenizer=ToolTokenizer(), sglang_url=f"{cluster.router.url}/generate")
    turn = await common.call_sglang_generate([1, 2], common.Session(), {}, adapter=adapter)
    assert turn == TurnRecord(
        [1, 2], [ord(c) for c in f"ok{END}"], "stop", turn.output_log_probs, False, turn.meta_info
    )
    assert "X-SMG-Routing-Key" not in cluster.engines[0].headers[0]
    await http_utils.get_http_client().close()


async def test_aborted_turns_continue_from_the_tokens_they_have(monkeypatch):
    monkeypatch.setattr(common, "RESUME_PAUSE_S", 0)
    replies = [
        {"finish_reason": {"type": "abort"}, "weight_version": "1", "ids": [10, 11], "prompt_tokens": 2},
        {"finish_reason": {"type": "abort"}, "weight_version": "2", "ids": [], "prompt_tokens": 4},
        {"finish_reason": {"type": "stop"}, "weight_version": "2", "ids": [12], "prompt_tokens": 4},
    ]
    sent = []

    async def post(url, payload, headers=None):
        sent.append((list(payload["input_ids"]), payload["sampling_params"]["max_new_tokens"], payload["rid"]))
        reply = dict(replies[len(sent) - 1])
        entries = [[-token / 10, token, None] for token in reply.pop("ids")]
        return {"text": "", "meta_info": {**reply, "output_token_logprobs": entries}}

    monkeypatch.setattr(common, "post", post)
    adapter = OpenAIAdapter(tokenizer=ToolTokenizer(), sglang_url="http://nowhere")
    turn = await common.call_sglang_generate([1, 2], common.Session(), {"max_tokens": 8}, adapter=adapter)
    assert [request[:2] for request in sent] == [([1, 2], 8), ([1, 2, 10, 11], 6), ([1, 2, 10, 11], 6)]
    assert len({rid for *_, rid in sent}) == 3
    assert (turn.prompt_ids, turn.output_ids, turn.finish_reason) == ([1, 2], [10, 11, 12], "stop")
    assert turn.output_log_probs == [-1.0, -1.1, -1.2]
    assert turn.meta_info["prompt_tokens"] == 10
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(tokens=turn.output_ids, log_probs=turn.output_log_probs, meta_info=turn.meta_info)
    spans = [(span["version"], span["start"], span["end"]) for span in sample.weight_version_spans]
    assert spans == [("1", 0, 2), ("2", 2, 3)]


async def test_a_turn_that_is_aborted_forever_is_an_error(monkeypatch):
    monkeypatch.setattr(common, "RESUME_PAUSE_S", 0)

    async def post(url, payload, headers=None):
        return {"meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": []}}

    monkeypatch.setattr(common, "post", post)
    adapter = OpenAIAdapter(tokenizer=ToolTokenizer(), sglang_url="http://nowhere")
    with pytest.raises(RuntimeError, match="aborted a turn of session 'x' 21 times without generating a token"):
        await common.call_sglang_generate([1], common.Session(), {}, adapter=adapter, session_id="x")


async def test_a_reply_without_log_probs_is_an_error(monkeypatch):
    async def post(url, payload, headers=None):
        return {"text": "x", "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 1}}

    monkeypatch.setattr(common, "post", post)
    adapter = OpenAIAdapter(tokenizer=ToolTokenizer(), sglang_url="http://nowhere")
    with pytest.raises(RuntimeError, match="reply has no meta_info with output_token_logprobs"):
        await common.call_sglang_generate([1], common.Session(), {}, adapter=adapter)


def test_parsers_that_sglang_lacks_are_named_at_once():
    def adapter(**options: Any) -> OpenAIAdapter:
        return OpenAIAdapter(tokenizer=ToolTokenizer(), sglang_url="http://nowhere", **options)

    adapter(tool_parser="qwen25", reasoning_parser="deepseek-r1")
    with pytest.raises(ValueError, match=r"SGLang has no tool-call parser 'qwen99'; it has .*qwen25, qwen3_coder"):
        adapter(tool_parser="qwen99")
    with pytest.raises(ValueError, match=r"SGLang has no reasoning parser 'qwen25'; it has .*deepseek-r1"):
        adapter(reasoning_parser="qwen25")
    with pytest.raises(ValueError, match="the tool-call parser must be named: 'auto' is found out by engines only"):
        adapter(tool_parser="auto")


def test_helpers_that_users_import():
    function = {"name": "f", "arguments": {"a": 1}}
    assert common.tool_call_dict("f", {"a": 1}) == {"type": "function", "function": function}
    cases = [("stop", []), ("length", []), ("length", [{}]), ("", [])]
    assert [common.manager_finish_reason(*case) for case in cases] == ["stop", "length", "tool_calls", "stop"]
    assert common.flatten_content(None) == ""
