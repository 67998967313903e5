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


OPTIONAL_INT = {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (OPTIONAL_INT, "3", 3),
        (OPTIONAL_INT, "null", None),
        (OPTIONAL_INT, "None", None),
        (OPTIONAL_INT, "3.5", "3.5"),
        ({"oneOf": [{"type": "boolean"}, {"type": "array"}]}, "[1]", [1]),
        ({"oneOf": [{"type": "boolean"}, {"type": "array"}]}, "True", True),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "3", "3"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", "None"),
        ({"type": ["string", "null"]}, "3", "3"),
        ({"type": ["integer", "null"]}, "3", 3),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": "integer"}, "null", "null"),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "True", "True"),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "object"}, "3", "3"),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": "integer"}]}, "3", 3),
        ({"allOf": [{"$ref": "#/$defs/Level"}], "description": "how"}, "2", 2),
        ({"$ref": "#/$defs/Level"}, "high", "high"),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/Missing"}, "3", "3"),
        ({"$ref": "#/$defs/Loop"}, "3", "3"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"enum": [1, 2]}, "7", 7),
        ({"const": False}, "false", False),
        ({"items": {"type": "integer"}}, "[1]", [1]),
        ({"properties": {"x": {}}}, '{"x": 1}', {"x": 1}),
        ({"description": "anything"}, "3", "3"),
        (True, "3", "3"),
        ({"type": "wrong"}, "3", "3"),
        ({"anyOf": []}, "3", "3"),
    ],
)
def test_values_have_the_type_of_the_schema_however_it_says_it(schema, value, expected):
    defs = {
        "Level": {"enum": [1, 2, "high"]},
        "Point": {"type": "object", "properties": {"x": {"type": "integer"}}},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]},
    }
    tools = [{"function": {"name": "f", "parameters": {"properties": {"p": schema}, "$defs": defs}}}]
    [use] = parse_xml_tool_uses(xml("f", p=value), tools)[1]
    assert use["input"] == {"p": expected}
    assert type(use["input"]["p"]) is type(expected)


def test_parameters_of_a_schema_that_is_made_of_others():
    schema = {"allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"b": {"type": "boolean"}}}]}
    parameters = {**schema, "$defs": {"Base": {"properties": {"a": {"type": "integer"}}}}}
    [use] = parse_xml_tool_uses(xml("f", a="1", b="true"), [{"function": {"name": "f", "parameters": parameters}}])[1]
    assert use["input"] == {"a": 1, "b": True}


@pytest.mark.parametrize(
    ("body", "note", "ill_formed"),
    [
        (xml("add", note="x </parameter> y"), "x </parameter> y", False),
        (xml("add", note="x </parameter> y", a="1"), "x </parameter> y", False),
        (xml("add", a="1", note="</function> and </tool_call>"), "</function> and </tool_call>", False),
        (xml("add", note="ends </function>\n</tool_call> so"), "ends </function>\n</tool_call> so", False),
        (xml("add", note="<parameter=q>1</parameter>"), "<parameter=q>1</parameter>", False),
        (xml("add", note="x").replace("<parameter", "stray <parameter"), "x", True),
        (xml("add", note="x").replace("</parameter>", ""), None, True),
    ],
)
def test_a_value_is_whole_or_the_call_is_ill_formed(body, note, ill_formed):
    parsed = parse_model_output(body, tools_schema=TOOLS, **NO_PARSERS)
    [use] = parsed.tool_uses
    assert parsed.ill_formed == ill_formed
    if note is not None:
        assert use["input"]["note"] == note


@pytest.mark.parametrize("length", range(1, len(xml("add", a="22"))))
def test_a_call_that_was_cut_after_a_good_one_is_ill_formed_and_stays_in_the_text(length):
    cut = xml("add", a="22")[:length]
    parsed = parse_model_output(xml("stop") + cut, tools_schema=TOOLS, **NO_PARSERS)
    assert parsed.tool_uses == [{"name": "stop", "input": {}}]
    assert parsed.text == cut.rstrip()
    assert parsed.ill_formed == (length >= len("<tool_call>"))


def test_a_call_that_another_interrupts_is_text():
    parsed = parse_model_output(
        "<tool_call><function=add><parameter=a>1" + xml("stop"), tools_schema=TOOLS, **NO_PARSERS
    )
    assert parsed.tool_uses == [{"name": "stop", "input": {}}]
    assert parsed == ParsedModelOutput(
        "", "<tool_call><function=add><parameter=a>1", [{"name": "stop", "input": {}}], True
    )


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
    """Stand-in for the process that ``sglang_parsers`` holds, with a pipe to the test."""

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
