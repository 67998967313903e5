"""Every request of a client is understood or refused, and never an error of the gateway."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slime.agent.adapters import AnthropicAdapter, BaseAdapter, OpenAIAdapter
from slime.agent.adapters.generation import sampling_params
from slime.agent.adapters.http_requests import Refusal
from slime.agent.adapters.responses import ResponsesFormat
from slime.agent.parsing import parse_xml_tool_uses
from tests.support.agents import ToolTokenizer, call_text

KEYS = [
    "role", "content", "type", "text", "name", "function", "arguments", "input", "thinking", "tool_calls", "parameters",
    "input_schema", "properties", "reasoning_content", "call_id", "output", "summary", "action",
]  # fmt: skip
WORDS = [
    "user",
    "assistant",
    "system",
    "tool",
    "text",
    "tool_use",
    "tool_result",
    "thinking",
    "f",
    "{}",
    "{",
    "",
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "reasoning",
    "custom",
    "function",
]
values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]), "content": values},
    optional={"tool_calls": values, "reasoning_content": values},
)
bodies = st.fixed_dictionaries(
    {"messages": st.lists(messages, max_size=3) | values},
    optional={"system": values, "tools": values, "n": values, "stop": values, "max_tokens": values},
)


@pytest.fixture(params=[AnthropicAdapter, OpenAIAdapter], scope="module")
def adapter(request: pytest.FixtureRequest) -> BaseAdapter:
    return request.param(tokenizer=ToolTokenizer(), sglang_url="http://nowhere")


items = st.dictionaries(st.sampled_from(KEYS), values, max_size=5)
for_responses = st.fixed_dictionaries(
    {"input": st.lists(messages | items, max_size=5) | values},
    optional={"instructions": values, "tools": values, "max_output_tokens": values},
)


@settings(max_examples=300, deadline=None)
@given(for_responses)
def test_any_body_for_responses_is_translated_or_refused(body: dict[str, Any]):
    try:
        translated, tools = ResponsesFormat().translate(body)
    except Refusal:
        return
    for message in translated:
        assert message["role"] in ("system", "user", "assistant", "tool")
        assert isinstance(message["content"], str)
        for call in message.get("tool_calls", []):
            assert isinstance(call["function"]["arguments"], dict)
    assert all(isinstance(tool["function"]["name"], str) for tool in tools or [])


@settings(max_examples=150, deadline=None)
@given(bodies)
@example({"messages": [{"role": "user", "content": "q"}], "tools": [{"name": 3}]})
@example({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 3}]}]})
@example({"messages": [{"role": "user"}], "tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]})
@example({"messages": [{"role": "user"}], "tools": [{"name": "f", "input_schema": {"properties": ["a"]}}]})
def test_any_body_is_translated_or_refused(adapter, body: dict[str, Any]):
    try:
        translated, tools = adapter.translate(body)
        sampling_params({}, body, stop_keys=adapter.stop_keys, max_tokens_keys=adapter.max_tokens_keys)
    except Refusal:
        return
    for message in translated:
        assert message["role"] in ("system", "user", "assistant", "tool")
        assert isinstance(message["content"], str)
        for call in message.get("tool_calls", []):
            assert isinstance(call["function"]["arguments"], dict)
    assert adapter.manager.follow("s", translated) == (translated, [])
    for tool in tools or []:
        name = tool["function"]["name"]
        text, uses = parse_xml_tool_uses(call_text(name, {"a": "1"}), tools)
        assert (text, len(uses)) == ("", 1) or not name.strip() or name != name.strip()
