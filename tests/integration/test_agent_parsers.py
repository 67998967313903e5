"""Reasoning and tool uses by the parsers of the installed SGLang, in whatever process can import it."""

from __future__ import annotations

import json

import pytest

from slime.agent.parsing import ParsedModelOutput, parse_model_output, parse_tool_uses
from slime.agent.sglang_parsers import check_names, split_reasoning
from tests.unit.agent.test_parsing import TOOLS, xml


def hermes(call: object) -> str:
    return f"<tool_call>\n{call if isinstance(call, str) else json.dumps(call)}\n</tool_call>"


CASES = {
    "qwen25": [
        ("no call ", ("no call ", [], False)),
        ("hi\n" + hermes({"name": "add", "arguments": {"a": 1}}), ("hi", [{"name": "add", "input": {"a": 1}}], False)),
        (
            hermes({"name": "add", "arguments": "two"}),
            ("", [{"name": "add", "input": {"_raw_arguments": '"two"'}}], True),
        ),
        (hermes('{"name": "add", "arguments": {'), (hermes('{"name": "add", "arguments": {'), [], True)),
        (hermes({"name": "unknown", "arguments": {}}), (hermes({"name": "unknown", "arguments": {}}), [], True)),
        (hermes("3"), (hermes("3"), [], True)),  # the parser itself raises
    ],
    "qwen3_coder": [
        ("hi\n" + xml("add", a="1", note="x"), ("hi\n", [{"name": "add", "input": {"a": 1, "note": "x"}}], False)),
        ("no call", ("no call", [], False)),
    ],
    "llama3": [
        (
            '<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
            ("", [{"name": "add", "input": {"a": 1}}], False),
        ),
    ],
    "mistral": [
        (
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "stop", "arguments": {}}]',
            ("", [{"name": "add", "input": {"a": 1}}, {"name": "stop", "input": {}}], False),
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize("parser", CASES)
def test_tool_calls_by_the_parsers_of_sglang(parser):
    for body, expected in CASES[parser]:
        assert parse_tool_uses(body, TOOLS, parser) == expected, body


@pytest.mark.parametrize(
    ("parser", "raw", "reasoning", "text"),
    [
        ("qwen3", "<think>\nfirst\n</think>\n\nthen", "first", "then"),
        ("qwen3", "then\n", "", "then\n"),
        ("qwen3", "<think>\nnever ends", "never ends", ""),
        ("deepseek-r1", "first</think>then", "first", "then"),
        ("glm45", "\n<think>first</think>\nthen", "first", "then"),
    ],
)
def test_reasoning_by_the_parsers_of_sglang(parser, raw, reasoning, text):
    parsed = parse_model_output(raw, tools_schema=None, tool_parser_name=None, reasoning_parser_name=parser)
    assert parsed == ParsedModelOutput(reasoning, text, [], False)


def test_reasoning_and_tool_calls_together():
    raw = "<think>\nI need a tool\n</think>\n\nOne moment.\n" + hermes({"name": "stop", "arguments": {}})
    parsed = parse_model_output(raw, tools_schema=TOOLS, tool_parser_name="qwen25", reasoning_parser_name="qwen3")
    assert parsed == ParsedModelOutput("I need a tool", "One moment.", [{"name": "stop", "input": {}}], False)


def test_parsers_that_sglang_lacks_are_named():
    with pytest.raises(ValueError, match=r"SGLang has no tool-call parser 'qwen99'; it has .*qwen25, qwen3_coder"):
        parse_tool_uses("x", TOOLS, "qwen99")
    with pytest.raises(ValueError, match=r"SGLang has no reasoning parser 'qwen99'; it has .*deepseek-r1"):
        parse_model_output("x", tools_schema=None, tool_parser_name=None, reasoning_parser_name="qwen99")


def test_the_names_that_are_checked_at_once_are_those_that_sglang_has():
    """Without importing it; both know every name that the other one knows."""
    said = {}
    for kind, parse in [
        ("tool-call", lambda: parse_tool_uses("x", TOOLS, "qwen99")),
        ("reasoning", lambda: split_reasoning("x", "qwen99")),
    ]:
        with pytest.raises(ValueError, match="SGLang has no") as of_the_package:
            parse()
        with pytest.raises(ValueError, match="SGLang has no") as at_once:
            check_names(*(("qwen99", None) if kind == "tool-call" else (None, "qwen99")))
        said[kind] = (str(of_the_package.value), str(at_once.value))
    assert all(package == at_once for package, at_once in said.values()), said
