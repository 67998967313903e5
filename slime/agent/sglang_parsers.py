"""SGLang's parsers of reasoning and tool calls, in this process or, where SGLang cannot be imported, in a helper.

SGLang imports triton before it knows the device. On a machine without triton the parsers run in a process that has the
stand-ins of CPU engines on its path, as no other process may.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from slime.arguments.passthrough.catalog import records_or_reason
from slime.arguments.passthrough.source import SGLANG


class UnparsableOutput(Exception):
    """A parser failed on what the model wrote."""


def split_reasoning(raw: str, parser_name: str) -> tuple[str, str]:
    """Return (reasoning, rest) by SGLang's reasoning parser. Raises ValueError for a name it lacks."""
    reasoning, rest = _call("reasoning", raw, parser_name)
    return reasoning, rest


def tool_calls(body: str, tools: list[Any], parser_name: str) -> tuple[str, list[tuple[str, str]], bool]:
    """Return the text without calls, the calls as (name, arguments in JSON), and whether one seemed to begin.

    Raises ValueError for a parser name that SGLang lacks, UnparsableOutput when the parser fails.
    """
    text, calls, began = _call("tools", body, tools, parser_name)
    return text, [(name, arguments) for name, arguments in calls], began


def check_names(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise ValueError for a parser that the installed SGLang does not have, without importing it."""
    found = records_or_reason(SGLANG)
    if isinstance(found, str):  # SGLang cannot tell here what it has
        return
    choices = {record["dest"]: record["choices"] or () for record in found}
    for kind, dest, name in [
        ("tool-call", "tool_call_parser", tool_parser),
        ("reasoning", "reasoning_parser", reasoning_parser),
    ]:
        if name == "auto":
            raise ValueError(f"the {kind} parser must be named: 'auto' is found out by engines only")
        if name is not None and name.lower() not in choices[dest]:
            raise _unknown(kind, name, choices[dest])


def _unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    return ValueError(f"SGLang has no {kind} parser {name!r}; it has {', '.join(sorted(set(known) - {'auto'}))}")


@cache
def importable() -> bool:
    """Whether SGLang can be imported in this process."""
    return importlib.util.find_spec("triton") is not None


def _call(function: str, *arguments: Any) -> Any:
    if importable():
        return FUNCTIONS[function](*arguments)
    from slime.agent import parser_process

    return parser_process.call(function, *arguments)


def _reasoning(raw: str, parser_name: str) -> tuple[str, str]:
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    known = ReasoningParser.DetectorMap
    if parser_name.lower() not in known:
        raise _unknown("reasoning", parser_name, known)
    try:
        reasoning, rest = ReasoningParser(parser_name, stream_reasoning=False).parse_non_stream(raw)
    except Exception:  # noqa: BLE001  (whatever a parser stumbles over, the model wrote it)
        return "", raw
    return reasoning or "", rest or ""


def _tools(body: str, tools: list[Any], parser_name: str) -> tuple[str, list[tuple[str, str]], bool]:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    known = FunctionCallParser.ToolCallParserEnum
    if parser_name not in known:
        raise _unknown("tool-call", parser_name, known)
    parser = FunctionCallParser([Tool(**tool) for tool in tools], parser_name)
    try:
        text, calls = parser.parse_non_stream(body)
        began = parser.has_tool_call(body)
    except Exception as e:  # likewise
        raise UnparsableOutput(f"{type(e).__name__}: {e}") from e
    return text or "", [(call.name or "", call.parameters) for call in calls], began


FUNCTIONS: dict[str, Callable[..., Any]] = {"reasoning": _reasoning, "tools": _tools}
