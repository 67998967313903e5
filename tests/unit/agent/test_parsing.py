"""Reasoning, text and tool uses: one format by hand, and what helps the others."""

from __future__ import annotations

import os
import signal

import pytest

from slime.agent import parser_process, sglang_parsers
from slime.agent.parsing import ParsedModelOutput, parse_model_output, parse_tool_uses, parse_xml_tool_uses


def tool(name: str, **properties: str) -> dict:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


TOOLS = [tool("add", a="integer", b="number", exact="boolean", note="string", more="object"), tool("stop")]


def xml(name: str, **parameters: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("just text ", ("just text ", [], False)),
        ("see\n\n" + xml("add", a="1"), ("see", [{"name": "add", "input": {"a": 1}}], False)),
        (xml("stop"), ("", [{"name": "stop", "input": {}}], False)),
        (
            xml("add", a="2", b="0.5", exact="True", note="3", more='{"k": [1]}', other="x"),
            (
                "",
                [{"name": "add", "input": {"a": 2, "b": 0.5, "exact": True, "note": "3", "more": {"k": [1]},
                                           "other": "x"}}],
                False,
            ),
        ),
        (xml("add", a="many"), ("", [{"name": "add", "input": {"a": "many"}}], False)),
        (xml("add", note="two\n\nlines <b>"), ("", [{"name": "add", "input": {"note": "two\n\nlines <b>"}}], False)),
        (
            xml("stop") + "\n" + xml("add", a="1"),
            ("", [{"name": "stop", "input": {}}, {"name": "add", "input": {"a": 1}}], False),
        ),
        (xml("unknown", a="1"), (xml("unknown", a="1"), [], True)),
        ("<tool_call>\n<function=add>\n<parameter=a>\n1", ("<tool_call>\n<function=add>\n<parameter=a>\n1", [], True)),
    ],
)  # fmt: skip
def test_the_format_that_is_parsed_by_hand(body, expected):
    assert parse_xml_tool_uses(body, TOOLS) == expected


def test_without_parsers_only_tools_are_looked_for():
    raw = "<think>hm</think>" + xml("stop")
    options = {"tool_parser_name": None, "reasoning_parser_name": None}
    assert parse_model_output(raw, tools_schema=None, **options) == ParsedModelOutput("", raw, [], False)
    assert parse_model_output(raw, tools_schema=TOOLS, **options) == ParsedModelOutput(
        "", "<think>hm</think>", [{"name": "stop", "input": {}}], False
    )


class Helper:
    """What ``parser_process`` holds of a process, with a pipe to the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        parser_process.close()
        command = ["sleep", "100"]
        popen = parser_process.subprocess.Popen
        monkeypatch.setattr(parser_process.subprocess, "Popen", lambda _, **options: popen(command, **options))
        monkeypatch.setattr(sglang_parsers, "importable", lambda: False)


def test_a_parser_that_hangs_is_ended_and_costs_one_turn(monkeypatch):
    Helper(monkeypatch)
    monkeypatch.setattr(parser_process, "START_DEADLINE_S", 0.05)
    assert parse_tool_uses("body", TOOLS, "qwen25") == ("body", [], True)
    assert parser_process._helper is None


def test_a_helper_that_dies_is_an_error_with_its_reason(monkeypatch):
    Helper(monkeypatch)
    helper = parser_process._helper = parser_process._Helper()
    os.kill(helper.process.pid, signal.SIGTERM)
    with pytest.raises(RuntimeError, match=r"parsers ended \(exit status -\d+\).*need the package sglang"):
        parse_tool_uses("body", TOOLS, "qwen25")
    assert parser_process._helper is None
