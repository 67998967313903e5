"""Reasoning, text and tool uses: one format by hand, and what helps the others."""

from __future__ import annotations

import os
import signal

import pytest

from slime.agent import sglang_parsers
from slime.agent.parsing import ParsedModelOutput, parse_model_output, parse_tool_uses, parse_xml_tool_uses


def tool(name: str, **properties: str) -> dict:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


NO_PARSERS = {"tool_parser_name": None, "reasoning_parser_name": None}
TOOLS = [tool("add", a="integer", b="number", exact="boolean", note="string", more="object"), tool("stop")]


def xml(name: str, **parameters: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("just text ", ("just text ", [])),
        ("see\n\n" + xml("add", a="1"), ("see", [{"name": "add", "input": {"a": 1}}])),
        (xml("stop"), ("", [{"name": "stop", "input": {}}])),
        (
            xml("add", a="2", b="0.5", exact="True", note="3", more='{"k": [1]}', other="x"),
            (
                "",
                [{"name": "add", "input": {"a": 2, "b": 0.5, "exact": True, "note": "3", "more": {"k": [1]},
                                           "other": "x"}}],
            ),
        ),
        (xml("add", a="many"), ("", [{"name": "add", "input": {"a": "many"}}])),
        (xml("add", note="two\n\nlines <b>"), ("", [{"name": "add", "input": {"note": "two\n\nlines <b>"}}])),
        (
            xml("stop") + "\n" + xml("add", a="1"),
            ("", [{"name": "stop", "input": {}}, {"name": "add", "input": {"a": 1}}]),
        ),
        (xml("unknown", a="1"), (xml("unknown", a="1"), [])),
        ("<tool_call>\n<function=add>\n<parameter=a>\n1", ("<tool_call>\n<function=add>\n<parameter=a>\n1", [])),
    ],
)  # fmt: skip
def test_the_format_that_is_parsed_by_hand(body, expected):
    assert parse_xml_tool_uses(body, TOOLS) == expected
    parsed = parse_model_output(body, tools_schema=TOOLS, **NO_PARSERS)
    assert parsed == ParsedModelOutput("", *expected, ill_formed="<tool_call>" in expected[0])


@pytest.mark.parametrize("schema", [{}, {"parameters": None}, {"parameters": {}}, {"parameters": {"properties": None}}])
def test_tools_may_lack_a_type_and_parameters(schema):
    tools = [{"function": {"name": "stop", **schema}}]
    assert parse_xml_tool_uses(xml("stop", a="1"), tools) == ("", [{"name": "stop", "input": {"a": "1"}}])


@pytest.mark.parametrize(
    ("raw", "reasoning", "text"),
    [
        ("<think>\nhm\n</think>\n\nyes ", "hm", "yes "),
        ("hm</think>yes", "hm", "yes"),  # the template has opened it
        ("<think></think>\nyes", "", "yes"),
        ("one</think>two</think>", "one", "two</think>"),
        ("\n no end <think>", "", "\n no end <think>"),
    ],
)
def test_without_a_parser_reasoning_is_what_comes_before_its_end(raw, reasoning, text):
    assert parse_model_output(raw, tools_schema=None, **NO_PARSERS) == ParsedModelOutput(reasoning, text, [], False)
    both = parse_model_output(raw + xml("stop"), tools_schema=TOOLS, **NO_PARSERS)
    assert both == ParsedModelOutput(reasoning, text.rstrip(), [{"name": "stop", "input": {}}], False)


@pytest.mark.parametrize(
    ("body", "began", "expected"),
    [
        ("see " + xml("add", a="1"), True, ("see", [{"name": "add", "input": {"a": 1}}], False)),
        ("see " + xml("add", a="1"), False, ("see", [{"name": "add", "input": {"a": 1}}], False)),
        (xml("stop") + "<tool_call>{", True, ("<tool_call>{", [{"name": "stop", "input": {}}], True)),
        ("<tool_call>{", True, ("<tool_call>{", [], True)),
        ("<tool_call>", False, ("<tool_call>", [], False)),  # no sign of a call in the format of that parser
    ],
)
def test_what_the_tool_parser_does_not_find_is_looked_for_by_hand(monkeypatch, body, began, expected):
    monkeypatch.setattr(sglang_parsers, "tool_calls", lambda body, tools, name: (body, [], began))
    parsed = parse_model_output(body, tools_schema=TOOLS, tool_parser_name="qwen25", reasoning_parser_name=None)
    assert parsed == ParsedModelOutput("", *expected)


class Helper:
    """What ``sglang_parsers`` holds of a process, with a pipe to the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sglang_parsers.close()
        command = ["sleep", "100"]
        popen = sglang_parsers.subprocess.Popen
        monkeypatch.setattr(sglang_parsers.subprocess, "Popen", lambda _, **options: popen(command, **options))
        monkeypatch.setattr(sglang_parsers, "importable", lambda: False)


def test_a_parser_that_hangs_is_ended_and_costs_one_turn(monkeypatch):
    Helper(monkeypatch)
    monkeypatch.setattr(sglang_parsers, "START_DEADLINE_S", 0.05)
    assert parse_tool_uses("body", TOOLS, "qwen25") == ("body", [], True)
    assert sglang_parsers._helper is None


def test_a_helper_that_dies_is_an_error_with_its_reason(monkeypatch):
    Helper(monkeypatch)
    helper = sglang_parsers._helper = sglang_parsers._Helper()
    os.kill(helper.process.pid, signal.SIGTERM)
    with pytest.raises(RuntimeError, match=r"parsers ended \(exit status -\d+\).*need the package sglang"):
        parse_tool_uses("body", TOOLS, "qwen25")
    assert sglang_parsers._helper is None
