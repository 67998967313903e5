"""The gateway for the Messages API: requests and replies as the API documents them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from aiohttp.test_utils import make_mocked_request

from slime.agent.adapters import AnthropicAdapter
from slime.agent.adapters.anthropic import (
    _fold_mid_list_system_into_user,
    _request_session_id,
    _tools_to_chat_tools,
    _translate_messages,
)
from slime.agent.harness import HarnessContext
from slime.utils.types import Sample
from tests.support.agents import BEGIN, END, ToolTokenizer, call_text, scripted_engine, served, trained_text

TOOLS = [{"name": "add", "description": "sums", "input_schema": {"properties": {"a": {"type": "integer"}}}}]
ADD = call_text("add", {"a": 1})
BASE = Sample(index=1, group_index=0, prompt="p", label="l")


@pytest.fixture
def gateway(monkeypatch) -> Iterator[Any]:
    """``start(*lines)``: engine and gateway; ``post(body)`` sends a request of session ``s``."""
    split = lambda raw, name: tuple(raw.removeprefix("<think>").split("</think>")) if "</think>" in raw else ("", raw)
    monkeypatch.setattr("slime.agent.sglang_parsers.split_reasoning", split)
    open_contexts = []

    def enter(context: Any) -> Any:
        open_contexts.append(context)
        return context.__enter__()

    def start(*lines: str, **options: Any) -> SimpleNamespace:
        cluster = enter(scripted_engine(*lines))
        adapter = AnthropicAdapter(
            tokenizer=ToolTokenizer(), sglang_url=cluster.router.url, reasoning_parser="qwen3", **options
        )
        handle = enter(served(adapter))
        adapter.open_session("s")
        session = enter(requests.Session())
        session.trust_env = False
        url = f"http://127.0.0.1:{handle.port}"

        def post(path: str = "/v1/messages", sid: str = "s", **body: Any) -> requests.Response:
            return session.post(url + path, json=body, headers={"x-api-key": sid}, timeout=20)

        engine = cluster.engines[0]
        return SimpleNamespace(adapter=adapter, post=post, url=url, get=session.get, engine=engine, script=engine.reply)

    yield start
    for context in reversed(open_contexts):
        context.__exit__(None, None, None)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_a_plain_answer(gateway):
    g = gateway("hello")
    reply = g.post(model="m", max_tokens=50, system="be brief", messages=[user("hi")])
    assert reply.status_code == 200
    body = reply.json()
    assert g.script.prompts == [f"{BEGIN}system\nbe brief{END}{BEGIN}user\nhi{END}{BEGIN}assistant\n"]
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": len(g.script.prompts[0]), "output_tokens": 6},
    }


async def test_two_turns_with_thinking_and_tools_are_one_clean_sample(gateway):
    both = call_text("add", {"a": 1}) + call_text("add", {"a": 2})
    g = gateway(f"<think>hm</think>wait{both}", "it is 3")
    first = g.post(messages=[user("1+2?")], tools=TOOLS).json()
    kinds = [block["type"] for block in first["content"]]
    assert (kinds, first["stop_reason"]) == (["thinking", "text", "tool_use", "tool_use"], "tool_use")
    assert [block["input"] for block in first["content"][2:]] == [{"a": 1}, {"a": 2}]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": str(block["input"])}]}
        for block in first["content"][2:]
    ]
    echoed = {"role": "assistant", "content": first["content"]}
    g.post(messages=[user("1+2?"), echoed, user([*results, {"type": "text", "text": "go on"}])], tools=TOOLS)
    prompts = g.script.prompts
    assert prompts[1] == (
        f"{prompts[0]}<think>hm</think>wait{both}{END}{BEGIN}tool\n{{'a': 1}}{END}{BEGIN}tool\n{{'a': 2}}{END}"
        f"{BEGIN}user\ngo on{END}{BEGIN}assistant\n"
    )
    [sample] = await g.adapter.finish_session("s", base_sample=BASE, reward=1.0)
    assert trained_text(sample) == [f"<think>hm</think>wait{both}{END}", f"it is 3{END}"]
    assert sample.metadata["use_tool"]


WRITE = [{"name": "write", "input_schema": {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}}]
WROTE = "<think>hm</think>wait" + call_text("write", {"a": "x  ", "b": "y"})


@pytest.mark.parametrize(
    ("change", "standing"),
    [
        (
            lambda thought, text, use: ["", thought, text, use | {"input": {"all": False, "b": "y", "a": "x"}}],
            WROTE + END,
        ),
        (lambda thought, text, use: [thought, text | {"text": " wait\n"}, use | {"input": {}}], WROTE + END),
        (lambda thought, text, use: [text, use | {"input": {"a": "x"}}], WROTE + END),
        (lambda thought, text, use: [use | {"id": "new", "input": {"b": "y", "a": "x", "c": None}}], WROTE + END),
        (lambda thought, text, use: [thought, text | {"text": "no"}, use | {"input": {}}], "<think>hm</think>"),
        (
            lambda thought, text, use: [thought, text, use | {"name": "other", "input": {"a": "x"}}],
            "<think>hm</think>wait<tool_call>\n<function=",
        ),
        (lambda thought, text, use: [thought, text, use, use | {"id": "toolu_new"}], WROTE),
        (lambda thought, text, use: [thought | {"thinking": "ho"}, text, use], "<think>h"),
    ],
)
async def test_what_a_client_cleans_is_what_the_model_wrote(gateway, change, standing):
    """``standing``: what of the answer begins the next prompt, and stays in training."""
    g = gateway(WROTE, "done")
    blocks = g.post(messages=[user("q")], tools=WRITE).json()["content"]
    result = {"type": "tool_result", "tool_use_id": blocks[2]["id"], "content": "ok"}
    echoed = {"role": "assistant", "content": change(*blocks)}
    request = {"messages": [user("q"), echoed, user([result])], "tools": WRITE}
    counted = g.post("/v1/messages/count_tokens", **request).json()["input_tokens"]
    assert g.post(**request).status_code == 200
    first, second = g.script.prompts
    assert counted == len(second)
    assert second.startswith(first + standing)
    assert standing == WROTE + END or not second.startswith(first + (WROTE + END)[: len(standing) + 1])
    [sample] = await g.adapter.finish_session("s", base_sample=BASE)
    assert trained_text(sample) == [standing, "done" + END]


def events(reply: requests.Response) -> list[tuple[str, dict[str, Any]]]:
    parts = [part.split("\n") for part in reply.text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


def test_streaming_gives_the_whole_turn_as_events(gateway):
    g = gateway(f"<think>hm</think>wait{ADD}")
    reply = g.post(model="m", messages=[user("q")], tools=TOOLS, stream=True)
    assert reply.headers["Content-Type"] == "text/event-stream"
    found = events(reply)
    assert all(name == data["type"] for name, data in found)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [name for name, _ in found] == [
        "message_start",
        *[block[0], block[1], block[1], block[2]],  # thinking has a signature, too
        *block,
        *block,
        "message_delta",
        "message_stop",
    ]
    begun = found[0][1]["message"]
    assert (begun["content"], begun["stop_reason"], begun["usage"]["output_tokens"]) == ([], None, 0)
    deltas = [data["delta"] for name, data in found if name == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == [
        "thinking_delta", "signature_delta", "text_delta", "input_json_delta",
    ]  # fmt: skip
    assert (deltas[0]["thinking"], deltas[2]["text"]) == ("hm", "wait")
    assert json.loads(deltas[3]["partial_json"]) == {"a": 1}
    assert [data["index"] for name, data in found if name == "content_block_start"] == [0, 1, 2]
    assert found[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2][1]["usage"] == {"output_tokens": len(f"<think>hm</think>wait{ADD}") + 1}


def test_an_answer_that_is_cut_short_and_one_that_is_empty(gateway):
    g = gateway("0123456789", "")
    cut = g.post(messages=[user("q")], max_tokens=4).json()
    assert (cut["content"], cut["stop_reason"]) == ([{"type": "text", "text": "0123"}], "max_tokens")
    empty = g.post(messages=[user("r")]).json()
    assert (empty["content"], empty["stop_reason"]) == ([{"type": "text", "text": ""}], "end_turn")


def test_sampling_parameters(gateway):
    g = gateway("x")
    g.post(messages=[user("a")], max_tokens=32000, temperature=0.2, stop_sequences=["X"], stop="no key of this API")
    params = g.engine.requests[0]["sampling_params"]
    assert {key: params[key] for key in ("max_new_tokens", "temperature", "stop")} == {
        "max_new_tokens": 32000, "temperature": 0.2, "stop": ["X"],
    }  # fmt: skip


def test_the_other_paths(gateway):
    g = gateway()
    assert g.get(g.url + "/healthz", timeout=20).json() == {"ok": True}
    assert requests.head(g.url, timeout=20).status_code == 200
    models = g.get(g.url + "/v1/models", timeout=20).json()
    [model] = models.pop("data")
    assert models == {"has_more": False, "first_id": "slime-actor", "last_id": "slime-actor"}
    assert datetime.fromisoformat(model.pop("created_at")).tzinfo is not None
    assert model == {"type": "model", "id": "slime-actor", "display_name": "slime-actor"}
    assert HarnessContext("/repo", "s", "http://gw").model_label == "slime-actor"
    assert g.post("/v1/chat/completions").status_code == 404
    assert g.post("/abort_request").status_code == 404


def test_tokens_are_counted_as_a_turn_would_have_them(gateway):
    g = gateway("x")
    body = {"system": "be brief", "messages": [user("q"), {"role": "system", "content": "now"}], "tools": TOOLS}
    counted = g.post("/v1/messages/count_tokens", **body)
    usage = g.post(**body).json()["usage"]
    assert counted.json() == {"input_tokens": len(g.script.prompts[0])} == {"input_tokens": usage["input_tokens"]}
    assert g.adapter.manager.turn_count("s") == 1
    assert g.post("/v1/messages/count_tokens", sid="new", messages=[user("q")]).status_code == 401
    assert set(g.adapter.store) == {"s"}  # nothing is opened for it
    assert g.post("/v1/messages/count_tokens", messages=[]).json()["error"]["type"] == "invalid_request_error"


async def test_tokens_are_not_counted_for_strangers_or_closed_sessions(gateway, monkeypatch):
    g = gateway()
    await g.adapter.shutdown_session("s")
    assert g.post("/v1/messages/count_tokens", messages=[user("q")]).status_code == 503
    monkeypatch.setattr("slime.agent.adapters.common.is_loopback", lambda host: False)
    assert g.post("/v1/messages/count_tokens", sid="new", messages=[user("q")]).status_code == 401


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [{"role": "tool", "content": "x"}]}, "role 'tool' is not user, assistant or system"),
        ({"messages": [user("q")], "tools": [{}]}, "tools must be a list of objects with a name"),
        ({"messages": [user("q")], "system": 3}, "content must be a string or a list of blocks"),
        ({"messages": [user("q")], "max_tokens": 0}, "max_tokens must be a whole number from 1 to 2147483647, not 0"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(gateway, body, words):
    reply = gateway().post(**body)
    assert reply.status_code == 400
    error = reply.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert words in error["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "sid"),
    [
        ({"Authorization": "Bearer abc", "X-Api-Key": "k"}, "abc"),
        ({"X-Api-Key": "k"}, "k"),
        ({"Authorization": "Basic abc"}, "default"),
        ({}, "default"),
    ],
)
def test_session_ids(headers, sid):
    assert _request_session_id(make_mocked_request("POST", "/v1/messages", headers=headers)) == sid


def test_translation(caplog):
    text = lambda s: {"type": "text", "text": s}
    body = {
        "system": [text("one"), text("two")],
        "messages": [
            user([text("q"), {"type": "tool_result", "content": "r"}, {"type": "tool_result"}, text("s"), text("t")]),
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    text("a"),
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"k": [1]}},
                    {"type": "tool_use", "id": "2", "name": "g", "input": {}},
                ],
            },
            {"role": "assistant", "content": "plain"},
            user([{"type": "image", "source": {}}, text("u")]),
            user([]),
        ],
    }
    call = lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}}
    assert _translate_messages(body["messages"], body["system"]) == [
        {"role": "system", "content": "one\ntwo"},
        {"role": "user", "content": "q"},
        {"role": "tool", "content": "r"},
        {"role": "tool", "content": ""},
        {"role": "user", "content": "s\nt"},
        {
            "role": "assistant",
            "content": "a",
            "reasoning_content": "hm",
            "tool_calls": [call("f", {"k": [1]}), call("g", {})],
        },
        {"role": "assistant", "content": "plain"},
        {"role": "user", "content": "u"},
        {"role": "user", "content": ""},
    ]
    assert "type 'image' is left out" in caplog.text


ANSWER = {"role": "assistant", "content": "a"}
RESULT = {"type": "tool_result", "content": "r"}
TEXT = {"type": "text", "text": "t"}


def system_message(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>\n"


X_BLOCK = {"type": "text", "text": reminder("x")}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([user("q"), ANSWER], None),
        ([system_message("x"), user("q")], None),  # the prompt of a body that has no other
        ([user("q"), system_message("x"), user("r")], [user("q\n" + reminder("x")), user("r")]),
        ([user("q"), system_message("x"), system_message("y")], [user("q\n" + reminder("x") + "\n" + reminder("y"))]),
        ([user([RESULT]), system_message("x"), ANSWER], [user([RESULT, X_BLOCK]), ANSWER]),
        ([user("q"), ANSWER, system_message("x"), user("r")], [user("q"), ANSWER, user(reminder("x") + "r")]),
        (
            [ANSWER, system_message("x"), system_message("y"), user("r")],
            [ANSWER, user(reminder("x") + reminder("y") + "r")],
        ),
        ([ANSWER, system_message([TEXT]), user("r")], [ANSWER, user(reminder("t") + "r")]),
        ([ANSWER, system_message("x"), user([TEXT])], [ANSWER, user([X_BLOCK, TEXT])]),
        ([ANSWER, system_message("x"), user([RESULT, RESULT, TEXT])], [ANSWER, user([RESULT, RESULT, X_BLOCK, TEXT])]),
        ([user("q"), ANSWER, system_message("x")], [user("q"), ANSWER, user(reminder("x"))]),
        ([user("q"), ANSWER, system_message("x"), ANSWER], [user("q"), ANSWER, user(reminder("x")), ANSWER]),
        ([system_message("w"), system_message("x"), user("q")], [system_message("w"), user(reminder("x") + "q")]),
    ],
)
def test_system_messages_in_the_middle_become_reminders_in_the_body(messages, expected):
    body = {"messages": list(messages), "model": "m"}
    assert _fold_mid_list_system_into_user(body) is (expected is not None)
    assert body == {"messages": expected or messages, "model": "m"}


def test_a_system_message_after_the_system_prompt_is_in_the_middle():
    body = {"system": "s", "messages": [system_message("x"), user("q")]}
    assert _fold_mid_list_system_into_user(body) is True
    assert body["messages"] == [user(reminder("x") + "q")]


async def test_a_reminder_after_a_tool_result_does_not_fork_the_conversation(gateway):
    """It stays where it was when the conversation continues."""
    g = gateway("one", "two")
    first = [user([RESULT]), system_message("x")]
    said = g.post(messages=first).json()["content"]
    g.post(messages=[*first, {"role": "assistant", "content": said}, user("go on")])
    assert g.script.prompts[1].startswith(g.script.prompts[0] + "one")
    [sample] = await g.adapter.finish_session("s", base_sample=BASE)
    assert trained_text(sample) == ["one" + END, "two" + END]


BILLING = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={};"


async def test_the_line_for_billing_does_not_fork_the_conversation(gateway):
    g = gateway("one", "two")
    system = lambda nonce: [{"type": "text", "text": BILLING.format(nonce)}, {"type": "text", "text": "be brief"}]
    said = g.post(system=system("abc"), messages=[user("q")]).json()["content"]
    g.post(system=system("def"), messages=[user("q"), {"role": "assistant", "content": said}, user("r")])
    assert g.script.prompts[0] == f"{BEGIN}system\nbe brief{END}{BEGIN}user\nq{END}{BEGIN}assistant\n"
    [sample] = await g.adapter.finish_session("s", base_sample=BASE)
    assert trained_text(sample) == ["one" + END, "two" + END]


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (BILLING, []),
        (BILLING + "\nbe brief", [system_message("be brief")]),
        (
            [{"type": "text", "text": BILLING + "\nbe"}, {"type": "text", "text": "brief"}],
            [system_message("be\nbrief")],
        ),
        ("be brief\n" + BILLING, [system_message("be brief\n" + BILLING)]),  # no line of Claude Code's
    ],
)
def test_the_line_for_billing_is_no_part_of_the_system_prompt(system, expected):
    assert _translate_messages([], system) == expected


def test_tools(caplog):
    chat = lambda **function: {"type": "function", "function": function}
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    assert _tools_to_chat_tools([*TOOLS, hosted, {"name": "stop"}, {"type": "custom", "name": "go"}]) == [
        chat(name="add", description="sums", parameters=TOOLS[0]["input_schema"]),
        chat(name="stop", description="", parameters={"type": "object", "properties": {}}),
        chat(name="go", description="", parameters={"type": "object", "properties": {}}),
    ]
    assert "tools that the provider would run itself are left out: web_search" in caplog.text
    assert _tools_to_chat_tools(None) is None
