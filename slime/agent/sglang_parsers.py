"""SGLang's parsers of reasoning and tool calls, in this process or, where SGLang cannot be imported, in a helper.

SGLang imports triton before it knows the device. On a machine without triton the parsers run in a process that has the
stand-ins of CPU engines on its path, as no other process may.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any


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
        raise ValueError(f"SGLang has no reasoning parser {parser_name!r}; it has {', '.join(sorted(known))}")
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
        raise ValueError(f"SGLang has no tool-call parser {parser_name!r}; it has {', '.join(sorted(known))}")
    parser = FunctionCallParser([Tool(**tool) for tool in tools], parser_name)
    try:
        text, calls = parser.parse_non_stream(body)
        began = parser.has_tool_call(body)
    except Exception as e:  # likewise
        raise UnparsableOutput(f"{type(e).__name__}: {e}") from e
    return text or "", [(call.name or "", call.parameters) for call in calls], began


FUNCTIONS: dict[str, Callable[..., Any]] = {"reasoning": _reasoning, "tools": _tools}
