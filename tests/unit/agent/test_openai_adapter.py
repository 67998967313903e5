"""The gateway for chat completions, used through OpenAI's own client library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp.test_utils import make_mocked_request

from slime.agent.adapters import OpenAIAdapter
from slime.agent.adapters.openai import _request_session_id, _translate_messages
from slime.ray.manager.rollout_metrics import sample_metrics
from slime.utils.types import Sample
from tests.support.agents import BEGIN, END, ToolTokenizer, call_text, scripted_engine, served, trained_text

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
ADD = call_text("add", {"a": 1})
BASE = Sample(index=1, group_index=0, prompt="p", label="l")


@pytest.fixture
def gateway() -> Iterator[Any]:
    """``start(*lines)``: engine, gateway and client of session ``s``."""
    open_contexts = []

    def enter(context: Any) -> Any:
        open_contexts.append(context)
        return context.__enter__()

    def start(*lines: str, **options: Any) -> SimpleNamespace:
        cluster = enter(scripted_engine(*lines))
        adapter = OpenAIAdapter(tokenizer=ToolTokenizer(), sglang_url=cluster.router.url, **options)
        handle = enter(served(adapter))
        adapter.open_session("s", sampling_defaults={"temperature": 0.7, "max_new_tokens": 100})
        url = f"http://127.0.0.1:{handle.port}/v1"
        client = enter(openai.OpenAI(base_url=url, api_key="s", max_retries=0))
        engine = cluster.engines[0]
        return SimpleNamespace(adapter=adapter, client=client, url=url, engine=engine, script=engine.reply)

    yield start
    for context in reversed(open_contexts):
        context.__exit__(None, None, None)


def ask(client: openai.OpenAI, *messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=list(messages), **options)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_plain_answer(gateway):
    g = gateway("hello")
    answer = ask(g.client, {"role": "developer", "content": "be brief"}, user("hi"))
    assert g.script.prompts == [f"{BEGIN}system\nbe brief{END}{BEGIN}user\nhi{END}{BEGIN}assistant\n"]
    assert answer.id.startswith("chatcmpl_")
    assert answer.model == "m"
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.message.tool_calls) == ("assistant", "hello", None)
    assert choice.finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(g.script.prompts[0]), len("hello") + 1)
    assert answer.usage.total_tokens == len(g.script.prompts[0]) + 6


def test_the_list_of_models(gateway):
    models = gateway().client.models.list()
    assert models.object == "list"
    [model] = models.data
    assert (model.id, model.object, model.owned_by) == ("slime-actor", "model", "slime")


async def test_two_turns_with_a_tool_are_one_clean_sample(gateway):
    g = gateway(ADD, "it is 2")
    first = ask(g.client, user("1+1?"), tools=TOOLS)
    [call] = first.choices[0].message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls"
    assert first.choices[0].message.content is None
    assert call.id.startswith("call_")
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    ask(g.client, user("1+1?"), first.choices[0].message, result, tools=TOOLS)
    prompts = g.script.prompts
    assert prompts[1] == f"{prompts[0]}{ADD}{END}{BEGIN}tool\n2{END}{BEGIN}assistant\n"
    [sample] = await g.adapter.finish_session("s", base_sample=BASE, reward=1.0, extra_metadata={"task": "sum"})
    assert "".join(map(chr, sample.tokens)) == f"{prompts[1]}it is 2{END}"
    assert trained_text(sample) == [ADD + END, "it is 2" + END]
    assert sample.response == f"{ADD}{END}{BEGIN}tool\n2{END}{BEGIN}assistant\nit is 2{END}"
    assert sample.rollout_log_probs[0] == -0.5 - ord("<") / 1000
    assert sample.metadata == {"task": "sum", "truncated": False, "use_tool": True, "ill_formed": False}
    assert sample.weight_versions == ["0", "0"]


async def test_streaming_says_the_same_as_a_plain_answer(gateway):
    g = gateway("two words", ADD)
    chunks = list(ask(g.client, user("q"), stream=True))
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "two words", None]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]
    assert chunks[-1].usage.completion_tokens == len("two words") + 1
    with g.client.chat.completions.stream(model="m", messages=[user("r")], tools=TOOLS) as stream:
        final = stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    assert final.choices[0].finish_reason == "tool_calls"
    assert len(await g.adapter.finish_session("s", base_sample=BASE)) == 2


async def test_an_accept_header_asks_for_a_stream(gateway):
    g = gateway("words")
    headers = {"Accept": "text/event-stream", "Authorization": "Bearer s"}
    async with aiohttp.ClientSession() as session:
        url = f"{g.url}/chat/completions"
        async with session.post(url, json={"messages": [user("q")]}, headers=headers) as reply:
            assert reply.content_type == "text/event-stream"
            lines = [line for line in (await reply.text()).split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: {") for line in lines[:-1])


async def test_only_the_first_tool_call_is_answered_and_recognized(gateway):
    both = "<tool_call><function=add></function></tool_call>" * 2
    g = gateway(both, "done")
    message = ask(g.client, user("q"), tools=TOOLS).choices[0].message
    assert len(message.tool_calls) == 1
    ask(g.client, user("q"), message, {"role": "tool", "content": "2", "tool_call_id": "x"}, tools=TOOLS)
    # the model sees both calls of its own in the next prompt
    assert g.script.prompts[1].startswith(g.script.prompts[0] + both + END)
    [sample] = await g.adapter.finish_session("s", base_sample=BASE)
    assert trained_text(sample) == [both + END, "done" + END]


async def test_the_agent_has_the_text_beside_a_call(gateway):
    g = gateway(f"I add them. {ADD}", f" \n{ADD}", "done")
    first = ask(g.client, user("q"), tools=TOOLS).choices[0].message
    assert first.content == "I add them."
    result = {"role": "tool", "content": "2", "tool_call_id": first.tool_calls[0].id}
    second = ask(g.client, user("q"), first, result, tools=TOOLS).choices[0].message
    assert second.content is None
    without_text = {**first.model_dump(), "content": None}  # as many agents send it back
    results = [result, {**result, "tool_call_id": second.tool_calls[0].id}]
    ask(g.client, user("q"), without_text, results[0], second, results[1], tools=TOOLS)
    [sample] = await g.adapter.finish_session("s", base_sample=BASE)
    assert trained_text(sample) == [f"I add them. {ADD}{END}", f" \n{ADD}{END}", f"done{END}"]


async def test_reasoning_is_answered_and_not_needed_to_recognize_the_answer(gateway, monkeypatch):
    monkeypatch.setattr(
        "slime.agent.sglang_parsers.split_reasoning",
        lambda raw, name: tuple(raw.removeprefix("<think>").split("</think>")),
    )
    g = gateway("<think>hm</think>yes", "<think>so</think>no", reasoning_parser="qwen3")
    message = ask(g.client, user("q")).choices[0].message
    assert (message.content, message.reasoning_content) == ("yes", "hm")
    stream = ask(g.client, user("q"), {"role": "assistant", "content": "yes"}, user("r"), stream=True)
    assert [getattr(chunk.choices[0].delta, "reasoning_content", None) for chunk in stream][1] == "so"
    assert g.adapter.manager.turn_count("s") == 2
    [sample] = await g.adapter.finish_session("s", base_sample=BASE)  # one path, not two
    assert trained_text(sample) == ["<think>hm</think>yes" + END, "<think>so</think>no" + END]


async def test_a_client_that_sends_reasoning_back_keeps_it_in_the_prompt(gateway, monkeypatch):
    monkeypatch.setattr(
        "slime.agent.sglang_parsers.split_reasoning",
        lambda raw, name: tuple(raw.removeprefix("<think>").split("</think>")),
    )
    g = gateway("<think>hm</think>yes", "<think>so</think>no", reasoning_parser="qwen3")
    message = ask(g.client, user("q")).choices[0].message
    ask(g.client, user("q"), message, user("r"))
    [sample] = await g.adapter.finish_session("s", base_sample=BASE)
    assert trained_text(sample) == ["<think>hm</think>yes" + END, "<think>so</think>no" + END]


def test_sampling_parameters(gateway):
    g = gateway(*["x"] * 4)
    ask(g.client, user("a"))
    ask(g.client, user("b"), temperature=0.1, top_p=0.5, stop=["X"], max_tokens=7, extra_body={"top_k": 3})
    ask(g.client, user("c"), max_completion_tokens=500, max_tokens=2)
    ask(g.client, user("d"), extra_body={"max_output_tokens": 9})
    fixed = {"skip_special_tokens": False, "spaces_between_special_tokens": False, "no_stop_trim": True}
    assert [request["sampling_params"] for request in g.engine.requests] == [
        {**fixed, "temperature": 0.7, "max_new_tokens": 100},
        {**fixed, "temperature": 0.1, "top_p": 0.5, "top_k": 3, "stop": ["X"], "max_new_tokens": 7},
        {**fixed, "temperature": 0.7, "max_new_tokens": 100},
        {**fixed, "temperature": 0.7, "max_new_tokens": 9},
    ]
    assert all(request["return_logprob"] is True for request in g.engine.requests)
    assert len({request["rid"] for request in g.engine.requests}) == 4
    assert all(headers["X-SMG-Routing-Key"] == "s" for headers in g.engine.headers)


async def test_an_answer_that_is_cut_short(gateway):
    g = gateway("0123456789")
    answer = ask(g.client, user("q"), max_tokens=4)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("0123", "length")
    [sample] = await g.adapter.finish_session("s", base_sample=BASE)
    assert sample.metadata["truncated"]
    assert (
        sample_metrics(SimpleNamespace(log_reward_category=None, sglang_speculative_algorithm=None), [sample])[
            "truncated_ratio"
        ]
        == 1.0
    )


async def test_an_ill_formed_tool_call_is_text_and_marked(gateway):
    g = gateway("<tool_call>\n<function=add>\n<para")
    answer = ask(g.client, user("q"), tools=TOOLS)
    assert answer.choices[0].message.content == "<tool_call>\n<function=add>\n<para"
    [sample] = await g.adapter.finish_session("s", base_sample=BASE)
    assert sample.metadata["ill_formed"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{", "the body is not JSON"),
        ("[]", "must be a JSON object, not list"),
        ("{}", "messages must be a list with at least one message"),
        ('{"messages": []}', "messages must be a list with at least one message"),
        ('{"messages": [3]}', "messages[0] must be an object with a role"),
        ('{"messages": [{"role": "user", "content": 3}]}', "content must be a string or a list of blocks, not int"),
        ('{"messages": [{"role": "assistant", "tool_calls": 3}]}', "tool_calls must be a list"),
        ('{"messages": [{"role": "assistant", "tool_calls": [3]}]}', "must be an object with a function"),
        ('{"messages": [{"role": "user", "content": "q"}], "tools": [{}]}', "tools[0] must be an object"),
        ('{"messages": [{"role": "user", "content": "q"}], "n": 2}', "n must be 1"),
        ('{"messages": [{"role": "user", "content": "q"}], "max_tokens": "many"}', "max_tokens must be a whole number"),
    ],
)
async def test_bad_requests_are_refused_with_the_reason(gateway, body, words):
    g = gateway()
    headers = {"Authorization": "Bearer s", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(f"{g.url}/chat/completions", data=body) as reply:
            assert reply.status == 400
            error = (await reply.json())["error"]
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


def request(**headers: str) -> Any:
    return make_mocked_request("POST", "/v1/chat/completions", headers=headers)


@pytest.mark.parametrize(
    ("headers", "body", "sid"),
    [
        ({"Authorization": "Bearer abc"}, {"user": "u"}, "abc"),
        ({"Authorization": "bearer  abc "}, {}, "abc"),
        ({"Authorization": "Basic abc"}, {"user": "u"}, "u"),
        ({"Authorization": "Bearer "}, {}, "default"),
        ({}, {"metadata": {"session_id": "m"}, "user": "u"}, "m"),
        ({}, {"metadata": {"other": 1}, "user": "u"}, "u"),
        ({}, {"metadata": 3, "user": 3}, "default"),
        ({}, {}, "default"),
    ],
)
def test_session_ids(headers, body, sid):
    assert _request_session_id(request(**headers), body) == sid


def test_translation(caplog):
    function = {"name": "f", "arguments": '{"a": 1}'}
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "image_url"}, "two"], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{broken"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "critic", "content": "x"},
    ]

    def calling(arguments: Any) -> dict:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    assert _translate_messages(messages) == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "one\ntwo"},
        calling({"a": 1}),
        {"role": "tool", "content": "r"},
        calling({"_raw_arguments": "{broken"}),
        calling({"_raw_arguments": "[1]"}),
        calling({}),
    ]
    assert "type 'image_url' is left out" in caplog.text
    assert "role 'critic' is left out" in caplog.text
