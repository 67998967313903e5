"""Agents that are written with the providers' libraries: three turns with tools are one sample, whatever the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter, common, event_stream, http_requests
from slime.utils.types import Sample
from tests.support.agents import END, call_text, gateway

pytestmark = pytest.mark.slow

BASE = Sample(index=1, group_index=0)
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
LINES = [
    call_text("add", {"a": 1, "b": 2}),
    "then" + call_text("add", {"a": 3, "b": 4}),
    call_text("add", {"a": 7, "b": 0}),
    "it is 7 – done ✓",
]
PROMPT = "1+2, then +4, then +0?"
Agent = Callable[[str, bool], Awaitable[str]]


async def messages_agent(url: str, streamed: bool) -> str:
    anthropic = pytest.importorskip("anthropic")
    tools = [{"name": "add", "description": "sums", "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    asked = {"model": "m", "max_tokens": 300, "tools": tools, "messages": messages}
    async with anthropic.AsyncAnthropic(base_url=url, api_key="s", max_retries=0) as client:
        while True:
            if streamed:
                async with client.messages.stream(**asked) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            uses = [block for block in answer.content if block.type == "tool_use"]
            assert (answer.stop_reason == "tool_use") == bool(uses)
            if not uses:
                return answer.content[0].text
            results = [
                {"type": "tool_result", "tool_use_id": use.id, "content": str(use.input["a"] + use.input["b"])}
                for use in uses
            ]
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]


async def chat_agent(url: str, streamed: bool) -> str:
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    tools: Any = [{"type": "function", "function": {"name": "add", "strict": True, "parameters": PARAMETERS}}]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="s", max_retries=0) as client:
        while True:
            asked = {"model": "m", "messages": messages, "tools": tools}
            if streamed:
                async with client.chat.completions.stream(**asked) as stream:
                    message = (await stream.get_final_completion()).choices[0].message
            else:
                message = (await client.chat.completions.create(**asked)).choices[0].message
            if not message.tool_calls:
                return message.content
            [call] = message.tool_calls
            said = message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
            for one in said["tool_calls"]:  # what the streaming helper adds
                one["function"].pop("parsed_arguments", None)
                one.pop("index", None)
            result = {"role": "tool", "tool_call_id": call.id, "content": total(call.function.arguments)}
            messages += [said, result]


async def responses_agent(url: str, streamed: bool) -> str:
    items: list[Any] = [{"role": "user", "content": PROMPT}]
    tools: Any = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="s", max_retries=0) as client:
        while True:
            asked = {"model": "m", "input": items, "tools": tools, "store": False}
            if streamed:
                async with client.responses.stream(**asked) as stream:
                    answer = await stream.get_final_response()
            else:
                answer = await client.responses.create(**asked)
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return answer.output_text
            items += answer.output
            items += [
                {"type": "function_call_output", "call_id": call.call_id, "output": total(call.arguments)}
                for call in calls
            ]


async def agents_sdk(url: str, streamed: bool, *, chat: bool = False) -> str:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def add(a: int, b: int) -> str:
        """The sum."""
        return str(a + b)

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="s", max_retries=0) as client:
        kind = agents.OpenAIChatCompletionsModel if chat else agents.OpenAIResponsesModel
        model = kind(model="m", openai_client=client)
        agent = agents.Agent(name="sums", instructions="add them up", model=model, tools=[add])
        if not streamed:
            return (await agents.Runner.run(agent, PROMPT)).final_output
        running = agents.Runner.run_streamed(agent, PROMPT)
        async for _ in running.stream_events():
            pass
        return running.final_output


async def agents_sdk_chat(url: str, streamed: bool) -> str:
    return await agents_sdk(url, streamed, chat=True)


def total(arguments: str) -> str:
    return str(sum(json.loads(arguments).values()))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("agent", [messages_agent, chat_agent, responses_agent, agents_sdk, agents_sdk_chat])
async def test_three_turns_with_tools_are_one_sample_with_every_token_of_the_engine(agent, streamed, monkeypatch):
    """Streams are kept alive several times in each turn."""
    monkeypatch.setattr(http_requests, "CLIENT_POLL_S", 0.01)
    monkeypatch.setattr(event_stream, "OPEN_AFTER_S", 0.0)
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.02)
    lines = list(LINES)
    if agent in (chat_agent, agents_sdk_chat):  # a message has text or a call in chat completions here
        lines[1] = lines[1].removeprefix("then")
    made: list[Any] = []
    original = common.call_sglang_generate

    async def noting(*arguments: Any, **options: Any) -> Any:
        made.append(await original(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(common, "call_sglang_generate", noting)
    kind = AnthropicAdapter if agent is messages_agent else OpenAIAdapter
    with gateway(kind, *lines, seconds=0.1 if streamed else 0.0) as g:
        assert await agent(g.url, streamed) == lines[-1]
        [sample] = await g.adapter.finish_session("s", base_sample=BASE, reward=1.0)
    assert ["".join(map(chr, turn.output_ids)) for turn in made] == [line + END for line in lines]
    cut = len(sample.tokens) - sample.response_length
    trained = [
        (token, log_prob)
        for token, log_prob, mask in zip(sample.tokens[cut:], sample.rollout_log_probs, sample.loss_mask, strict=True)
        if mask
    ]
    expected = [pair for turn in made for pair in zip(turn.output_ids, turn.output_log_probs, strict=True)]
    assert trained == expected  # all of them, once, in order
    assert sample.tokens == [*made[-1].prompt_ids, *made[-1].output_ids]


@pytest.mark.parametrize("streamed", [False, True])
def test_errors_are_those_of_the_anthropic_library(streamed):
    anthropic = pytest.importorskip("anthropic")
    with gateway(AnthropicAdapter, "a", max_turns_per_sid=1) as g:

        def ask(sid: str = "s", **options: Any) -> Any:
            client = anthropic.Anthropic(base_url=g.url, api_key=sid, max_retries=0)
            asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "q"}], **options}
            if not streamed:
                return client.messages.create(**asked)
            with client.messages.stream(**asked) as stream:
                return stream.get_final_message()

        assert ask().content[0].text == "a"
        with pytest.raises(anthropic.RateLimitError, match="has had its 1 turns"):
            ask()
        g.adapter.open_session("other")
        with pytest.raises(anthropic.BadRequestError, match="max_tokens must be a whole number"):
            ask("other", max_tokens=-1)
        client = anthropic.Anthropic(base_url=g.url, api_key="s", max_retries=0)
        counted = client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "q"}])
        assert counted.input_tokens == len(g.script.prompts[0])
        assert [model.id for model in client.models.list()] == ["slime-actor"]


@pytest.mark.soak
async def test_many_sessions_of_many_turns_do_not_mix_and_leave_nothing():
    """64 sessions of 10 turns, all at the same time, over the Responses API."""
    with gateway(OpenAIAdapter) as g:
        g.engine.reply = lambda ids, params: [*ids[-12:-4], ord(END)]  # depends on the conversation

        async def one(sid: str) -> None:
            g.adapter.open_session(sid, sampling_defaults={"max_new_tokens": 50})
            options: Any = {"base_url": f"{g.url}/v1", "api_key": sid, "max_retries": 0, "timeout": 600.0}
            async with openai.AsyncOpenAI(**options) as client:
                items: list[Any] = []
                for number in range(10):
                    items.append({"role": "user", "content": f"{sid} asks {number}"})
                    async with client.responses.stream(model="m", input=items) as stream:
                        items += (await stream.get_final_response()).output
            [sample] = await g.adapter.finish_session(sid, base_sample=BASE)
            text = "".join(map(chr, sample.tokens))
            assert [text.count(f"{sid} asks {number}{END}") for number in range(10)] == [1] * 10
            assert text.count(" asks ") == 10
            assert sample.effective_response_length == 90

        await asyncio.gather(*(one(f"<{number:02}>") for number in range(64)))
        g.adapter.store.pop("s")
        assert (g.adapter.store, g.adapter.manager._roots, g.adapter.manager._turns) == ({}, {}, {})
        assert (g.adapter.inflight._turns, g.engine.running) == ({}, {})
