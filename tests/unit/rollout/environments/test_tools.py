"""Schemas of plain functions, and the calls that models write."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import Field

from slime.rollout.environments import ToolCall, ToolError, ToolRegistry, tool_of
from slime.rollout.environments.tools import parse_tool_calls
from tests.support.environments import add


def search(
    query: Annotated[str, Field(description="what to look for")],
    kind: Literal["web", "news"] = "web",
    title: list[str] | None = None,
) -> str:
    return f"{query} {kind} {title}"


def test_the_schema_of_a_function():
    assert tool_of(add).schema() == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }


def test_descriptions_choices_and_a_parameter_called_title():
    properties = tool_of(search).parameters["properties"]
    assert properties["query"] == {"type": "string", "description": "what to look for"}
    assert properties["kind"] == {"type": "string", "enum": ["web", "news"], "default": "web"}
    assert properties["title"] == {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
                                   "default": None}  # fmt: skip


def test_functions_that_cannot_be_tools():
    def untyped(a):  # type: ignore[no-untyped-def]
        return a

    def many(*a: int) -> int:
        return sum(a)

    with pytest.raises(TypeError, match="tool 'untyped': parameter 'a' needs a type hint"):
        tool_of(untyped)
    with pytest.raises(TypeError, match=r"tool 'many': a call names every argument, so \*a: 'int' cannot be one"):
        tool_of(many)
    with pytest.raises(ValueError, match="two tools are called 'add'"):
        ToolRegistry([add, add])


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ({"a": 2, "b": 3}, "5"),
        ({"a": "2"}, "3"),
        ({}, "a: Field required"),
        ({"a": 1, "c": 2}, "c: Extra inputs are not permitted"),
    ],
)
async def test_arguments_are_checked(arguments, answer):
    try:
        found = await ToolRegistry([add]).call(ToolCall("add", arguments))
    except ToolError as e:
        found = str(e)
    assert found == answer


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call", []),
        ('a<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>b', [ToolCall("f", {"x": 1})]),
        ('<tool_call>\n{"name": "f"}\n</tool_call><tool_call>{"name": "g"}', [ToolCall("f", {}), ToolCall("g", {})]),
        ('<think><tool_call>{"name": "f"}</tool_call></think>four', []),
        ("<tool_call>f(1)</tool_call>", ["a tool call must be JSON: Expecting value: line 1 column 1 (char 0)"]),
        ('<tool_call>["f"]</tool_call>', ['a tool call must be {"name": "...", "arguments": {...}}']),
        ('<tool_call>{"name": "f", "arguments": 3}', ['a tool call must be {"name": "...", "arguments": {...}}']),
    ],
)
def test_calls_are_read(text, calls):
    assert [str(c) if isinstance(c, ToolError) else c for c in parse_tool_calls(text)] == calls
