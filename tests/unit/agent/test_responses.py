"""The Responses API, used through OpenAI's own client library and by requests as Codex sends them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.agent.adapters import OpenAIAdapter
from slime.agent.adapters.common import Reply
from slime.agent.adapters.http_requests import Refusal
from slime.agent.adapters.responses import ResponsesFormat
from slime.agent.same_answer import is_form_of
from slime.utils.types import Sample
from tests.support.agents import BEGIN, END, call_text, gateway, trained_text

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False},
    {"type": "custom", "name": "patch", "format": {"type": "text"}},
    {"type": "web_search"},
]
ADD = call_text("add", {"a": 1})
PATCH = call_text("patch", {"input": "*** Begin\nx"})
BASE = Sample(index=1, group_index=0)
API = ResponsesFormat()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``start(*lines)``: a gateway and the client of its session ``s``."""
    split = lambda raw, name: tuple(raw.removeprefix("<think>").split("</think>")) if "</think>" in raw else ("", raw)
    monkeypatch.setattr("slime.agent.sglang_parsers.split_reasoning", split)
    running = []

    def begin(*lines: str, **options: Any) -> SimpleNamespace:
        running.append(gateway(OpenAIAdapter, *lines, reasoning_parser="qwen3", **options))
        g = running[-1].__enter__()
        g.client = openai.OpenAI(base_url=f"{g.url}/v1", api_key="s", max_retries=0)
        return g

    yield begin
    for context in running:
        context.__exit__(None, None, None)


def ask(g: Any, given: Any, **options: Any) -> Any:
    return g.client.responses.create(model="m", input=given, store=False, **options)


def test_a_plain_answer(start):
    g = start("hello")
    answer = ask(g, "hi", instructions="be brief", max_output_tokens=50, metadata={"k": "v"})
    assert g.script.prompts == [f"{BEGIN}system\nbe brief{END}{BEGIN}user\nhi{END}{BEGIN}assistant\n"]
    assert (answer.object, answer.status, answer.model, answer.output_text) == ("response", "completed", "m", "hello")
    assert (answer.instructions, answer.max_output_tokens, answer.metadata) == ("be brief", 50, {"k": "v"})
    assert answer.id.startswith("resp_")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(g.script.prompts[0]), 6)
    assert answer.usage.total_tokens == len(g.script.prompts[0]) + 6
    assert g.engine.requests[0]["sampling_params"]["max_new_tokens"] == 50


@pytest.mark.parametrize("streamed", [False, True])
async def test_calls_in_parallel_and_reasoning_become_one_clean_sample(start, streamed):
    first = f"<think>hm</think>both{ADD}{PATCH}"
    g = start(first, "done", "more")

    def turn(given: list[Any]) -> Any:
        if not streamed:
            return ask(g, given, tools=TOOLS)
        with g.client.responses.stream(model="m", input=given, tools=TOOLS) as stream:
            return stream.get_final_response()

    items: list[Any] = [{"role": "user", "content": "q"}]
    answer = turn(items)
    thought, said, add, patch = answer.output
    assert (thought.type, thought.content[0].text, said.content[0].text) == ("reasoning", "hm", "both")
    assert (add.type, add.name, json.loads(add.arguments)) == ("function_call", "add", {"a": 1})
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", "*** Begin\nx")
    # results between the calls, as some clients send them
    items += [thought, said, add, {"type": "function_call_output", "call_id": add.call_id, "output": "2"}]
    items += [
        patch,
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": [{"type": "input_text", "text": "ok"}]},
    ]
    items += turn(items).output
    items += [{"role": "user", "content": "r"}]
    assert turn(items).output_text == "more"
    prompts = g.script.prompts
    assert prompts[1] == f"{prompts[0]}{first}{END}{BEGIN}tool\n2{END}{BEGIN}tool\nok{END}{BEGIN}assistant\n"
    [sample] = await g.adapter.finish_session("s", base_sample=BASE)
    assert trained_text(sample) == [f"{first}{END}", f"done{END}", f"more{END}"]


async def test_an_answer_that_is_cut_is_incomplete_and_the_stream_still_complete(start):
    g = start("0123456789", "0123456789")
    answer = ask(g, "q", max_output_tokens=4)
    with g.client.responses.stream(model="m", input="q", max_output_tokens=4) as stream:
        streamed = stream.get_final_response()
    for one in (answer, streamed):
        assert (one.status, one.incomplete_details.reason, one.output_text) == (
            "incomplete",
            "max_output_tokens",
            "0123",
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"input": []}, "input must be a string or a list with at least one item"),
        ({"input": "q", "previous_response_id": "resp_1"}, "previous_response_id is not supported: nothing is stored"),
        ({"input": "q", "background": True}, "background is not supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference is not supported"),
        ({"input": [{"role": "critic", "content": "x"}]}, "role 'critic' is not user"),
        ({"input": [3]}, "input[0] must be an object"),
        ({"input": "q", "tools": [{"type": "function"}]}, "tools[0] must have a name"),
        ({"input": "q", "tools": 3}, "tools must be a list of objects"),
    ],
)
def test_what_is_not_understood_is_refused_with_the_reason(start, options, words):
    g = start()
    with pytest.raises(openai.BadRequestError) as caught:
        g.client.responses.create(model="m", **options)
    assert words in caught.value.message
    assert caught.value.type == "invalid_request_error"


def test_what_codex_sends(caplog):
    call = {"type": "function_call", "name": "shell", "arguments": '{"a": 1}', "call_id": "foreign_1"}
    body = {
        "model": "m", "instructions": "be good", "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "stream": True,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "key", "client_metadata": {}, "text": {},
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "xyz", "content": None},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
            call,
            {**call, "call_id": "foreign_2"},
            {"type": "function_call_output", "call_id": "foreign_1", "output": "one"},
            {"type": "function_call_output", "call_id": "foreign_2", "output": "two"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "message", "role": "developer", "content": "hurry"},
            {**call, "call_id": "foreign_3", "arguments": "{broken"},
            {"type": "function_call_output", "call_id": "foreign_3", "output": "three"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
            {"type": "local_shell_call", "call_id": "x", "action": {"command": ["ls"]}},
        ],
    }  # fmt: skip

    def called(name: str, arguments: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "arguments": arguments}}

    messages, tools = API.translate(body)
    assert messages == [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "<system-reminder>\nrules\n</system-reminder>\nfix"},
        {"role": "assistant", "content": "I look", "tool_calls": [called("shell", {"a": 1})] * 2},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "user", "content": "<system-reminder>\nhurry\n</system-reminder>\n"},
        {"role": "assistant", "content": "", "tool_calls": [called("shell", {"_raw_arguments": "{broken"})]},
        {"role": "tool", "content": "three"},
        {
            "role": "assistant", "content": "", "reasoning_content": "so",
            "tool_calls": [called("local_shell", {"command": ["ls"]})],
        },
    ]  # fmt: skip
    assert [tool["function"]["name"] for tool in tools] == ["add", "patch"]
    assert "an input item of type 'web_search_call' is left out" in caplog.text
    assert "a tool of type 'web_search' is left out: it is neither a function nor a custom tool" in caplog.text


def test_the_session_of_a_request(start):
    g = start("a", "b")
    g.adapter.open_session("of codex")
    g.adapter.open_session("someone")
    anonymous = openai.OpenAI(base_url=f"{g.url}/v1", api_key="", max_retries=0)
    anonymous.responses.create(model="m", input="q", prompt_cache_key="of codex")
    anonymous.responses.create(model="m", input="q", user="someone", prompt_cache_key="of codex")
    assert [g.adapter.manager.turn_count(sid) for sid in ("of codex", "someone", "default")] == [1, 1, 0]


def test_only_reasoning_is_an_answer_of_its_own():
    items = [{"type": "reasoning", "content": [{"text": "hm"}]}, {"role": "user", "content": "and?"}]
    with pytest.raises(Refusal):
        API.translate({"input": None})
    assert API.translate({"input": items})[0] == [
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "user", "content": "and?"},
    ]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
uses = st.fixed_dictionaries(
    {"name": st.sampled_from(["add", "patch"]), "input": st.dictionaries(texts, texts | st.integers(), max_size=2)}
)
turns = st.lists(st.tuples(texts, texts, st.lists(uses, max_size=3)), min_size=1, max_size=4)


@given(turns, st.booleans(), st.booleans(), st.booleans())
def test_however_a_client_sends_answers_back_they_are_recognized(turns, interleaved, keeps_reasoning, keeps_ids):
    items: list[Any] = [{"role": "user", "content": "q"}]
    expected = [{"role": "user", "content": "q"}]
    for reasoning, text, tool_uses in turns:
        if not text and not tool_uses:
            reasoning = ""  # a client that drops the reasoning drops all there is
        message = API.reply_message(Reply(reasoning, text, tool_uses, "stop", 1, 1), {"tools": TOOLS})
        said = [{k: v for k, v in item.items() if keeps_ids or k not in ("id", "status")} for item in message["items"]]
        said = [item for item in said if keeps_reasoning or item["type"] != "reasoning"]
        results = [
            {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "r"}
            for item in said
            if "call_id" in item
        ]
        calls = [item for item in said if "call_id" in item]
        items += [item for item in said if "call_id" not in item]
        if interleaved:
            items += [item for pair in zip(calls, results, strict=True) for item in pair]
        else:
            items += [*calls, *results]
        expected.append(API.translate_reply(message))
        expected += [{"role": "tool", "content": "r"} for _ in results]
        if not results:
            items.append({"role": "user", "content": "next"})
            expected.append({"role": "user", "content": "next"})
    found = API.translate({"input": items})[0]
    assert len(found) == len(expected)
    for theirs, own in zip(found, expected, strict=True):
        assert is_form_of(theirs, own) if own["role"] == "assistant" else theirs == own
