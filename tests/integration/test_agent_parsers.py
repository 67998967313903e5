"""Reasoning and tool uses by the parsers of the installed SGLang, in whatever process can import it."""

from __future__ import annotations

import json
from collections.abc import Callable

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


def said(parser: str, *calls: tuple[str, dict[str, object]]) -> str:
    """The calls in the format of ``parser``."""
    one, before, between, after = FORMATS[parser]
    return before + between.join(one(name, arguments) for name, arguments in calls) + after


FORMATS: dict[str, tuple[Callable[[str, dict[str, object]], str], str, str, str]] = {
    "qwen25": (lambda n, a: hermes({"name": n, "arguments": a}), "", "\n", ""),
    "hermes": (lambda n, a: hermes({"name": n, "arguments": a}), "", "\n", ""),
    "qwen3_coder": (lambda n, a: xml(n, **{key: str(value) for key, value in a.items()}), "", "\n", ""),
    "glm45": (
        lambda n, a: (
            f"<tool_call>{n}\n"
            + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in a.items())
            + "</tool_call>"
        ),
        "",
        "\n",
        "",
    ),
    "deepseekv3": (
        lambda n, a: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{json.dumps(a)}\n```<｜tool▁call▁end｜>"
        ),
        "<｜tool▁calls▁begin｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        lambda n, a: f"<|tool_call_begin|>functions.{n}:0<|tool_call_argument_begin|>{json.dumps(a)}<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "llama3": (lambda n, a: json.dumps({"name": n, "parameters": a}), "<|python_tag|>", "; ", ""),
    "mistral": (lambda n, a: json.dumps({"name": n, "arguments": a}), "[TOOL_CALLS] [", ", ", "]"),
    "pythonic": (
        lambda n, a: f"{n}({', '.join(f'{key}={value!r}' for key, value in a.items())})",
        "[",
        ", ",
        "]",
    ),
    "step3": (
        lambda n, a: (
            f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{n}">'
            + "".join(f'<steptml:parameter name="{k}">{v}</steptml:parameter>' for k, v in a.items())
            + "</steptml:invoke><｜tool_call_end｜>"
        ),
        "<｜tool_calls_begin｜>",
        "",
        "<｜tool_calls_end｜>",
    ),
    "minimax-m2": (
        lambda n, a: (
            f'<invoke name="{n}">\n'
            + "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in a.items())
            + "</invoke>"
        ),
        "<minimax:tool_call>\n",
        "\n",
        "\n</minimax:tool_call>",
    ),
}
FIRST, SECOND = ("add", {"a": 1, "note": "x"}), ("add", {"a": 22, "note": "yy"})


@pytest.mark.parametrize("parser", FORMATS)
def test_a_call_that_was_cut_after_a_good_one_is_not_passed_over(parser):
    """Wherever it was cut: it is no call, and either it is in the text, or nothing of it was there."""
    both = [{"name": name, "input": arguments} for name, arguments in (FIRST, SECOND)]
    whole = said(parser, FIRST, SECOND)
    assert parse_tool_uses(whole, TOOLS, parser) == ("", both, False)
    one, before, between, after = FORMATS[parser]
    begins = len(before + one(*FIRST) + between)
    ends = len(whole) - len(after)
    for length in range(begins + 1, ends):
        text, uses, ill_formed = parse_tool_uses(whole[:length], TOOLS, parser)
        if uses == both:  # all but what closes the call
            continue
        assert ill_formed, whole[:length]
        assert uses in (both[:1], [])
        assert text.endswith(whole[begins:length])


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm45", "minimax-m2"])
def test_a_value_that_holds_the_end_of_a_value_is_ill_formed(parser):
    end = "</arg_value>" if parser == "glm45" else "</parameter>"
    _, uses, ill_formed = parse_tool_uses(said(parser, ("add", {"note": f"x {end} y"})), TOOLS, parser)
    assert ill_formed or uses == [{"name": "add", "input": {"note": f"x {end} y"}}]


def test_a_call_of_a_tool_that_is_not_there_beside_a_good_one_is_ill_formed():
    body = said("qwen25", FIRST, ("unknown", {}), SECOND)
    both = [{"name": name, "input": arguments} for name, arguments in (FIRST, SECOND)]
    assert parse_tool_uses(body, TOOLS, "qwen25")[1:] == (both, True)


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
