"""Parses what a model wrote: reasoning, text for the user, and tool uses.

Models have their own formats; SGLang's parsers know them by name. One format is parsed here without SGLang.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.agent import sglang_parsers, unread_calls
from slime.agent.parameter_types import parameter_schemas, typed

logger = logging.getLogger(__name__)

ToolSchemas = Sequence[Mapping[str, Any]]
"""Tools as the chat templates take them: ``{"type": "function", "function": {"name", "parameters", ...}}``."""

_CALL_BEGIN = re.compile(r"<tool_call>\s*<function=([^>\n]+)>")
_CALL_END = re.compile(r"</function>\s*</tool_call>")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)


@dataclass(frozen=True)
class ParsedModelOutput:
    """``tool_uses`` are ``{"name", "input"}``; ``ill_formed``: a tool use could not be read as meant."""

    reasoning: str = ""
    text: str = ""
    tool_uses: list[dict[str, Any]] = field(default_factory=list)
    ill_formed: bool = False


def parse_model_output(
    raw_output: str,
    *,
    tools_schema: ToolSchemas | None,
    tool_parser_name: str | None,
    reasoning_parser_name: str | None,
) -> ParsedModelOutput:
    """Parse ``raw_output`` with SGLang's parsers of these names.

    Without a reasoning parser the reasoning is what comes before ``</think>``. Without tools no tool use is looked for;
    where the tool parser finds none, or there is no tool parser, they are looked for in the format of
    ``parse_xml_tool_uses``. Raises ValueError for a parser that SGLang lacks.
    """
    reasoning, body = _split_reasoning(raw_output, reasoning_parser_name)
    if not tools_schema:
        return ParsedModelOutput(reasoning, body)
    parsed: tuple[str, list[dict[str, Any]], bool] = (body, [], False)
    if tool_parser_name:
        parsed = parse_tool_uses(body, tools_schema, tool_parser_name)
    text, tool_uses, ill_formed = parsed
    if not tool_uses:
        text, tool_uses, uneven = _read_xml(text, tools_schema)
        if tool_uses or not tool_parser_name:
            ill_formed = uneven or "<tool_call>" in text
    return ParsedModelOutput(reasoning, text, tool_uses, ill_formed)


def _split_reasoning(raw_output: str, parser_name: str | None) -> tuple[str, str]:
    """Return (reasoning, rest); the rest is ``raw_output`` as it is when there is no reasoning."""
    if parser_name:
        reasoning, rest = sglang_parsers.split_reasoning(raw_output.lstrip(), parser_name)
        found = bool(reasoning)
    else:
        before, end, rest = raw_output.lstrip().partition("</think>")
        reasoning, found = before.removeprefix("<think>"), bool(end)
    return (reasoning.strip("\n"), rest.lstrip("\n")) if found else ("", raw_output)


def parse_tool_uses(body: str, tools_schema: ToolSchemas, parser_name: str) -> tuple[str, list[dict[str, Any]], bool]:
    """Return the text without tool uses, the tool uses, and whether one was ill-formed, by SGLang's parser.

    Arguments that are no JSON object become ``{"_raw_arguments": text}``. When something began like a tool use and none
    could be read, the text is ``body`` as it is, so that the agent sees it; so is a last one that was cut.
    """
    text, uses, ill_formed = _by_sglang(body, tools_schema, parser_name)
    start = unread_calls.suspicious_start(body, len(uses)) if uses else None
    if start is None:
        return text, uses, ill_formed
    before, earlier, _ = _by_sglang(body[:start], tools_schema, parser_name)
    if len(uses) > len(earlier) and not unread_calls.is_cut(body[start:]):
        return text, uses, True
    return (before if earlier else body[:start]) + body[start:], earlier, True


def _by_sglang(body: str, tools_schema: ToolSchemas, parser_name: str) -> tuple[str, list[dict[str, Any]], bool]:
    try:
        text, calls, began = sglang_parsers.tool_calls(body, list(tools_schema), parser_name)
    except sglang_parsers.UnparsableOutput as e:
        logger.info("tool parser %s: %s", parser_name, e)
        return body, [], True
    if parser_name == "pythonic":  # which takes a list of calls for one when it is whole
        began = began or any(f"[{tool['function']['name']}(" in body for tool in tools_schema)
    if began and not calls:
        return body, [], True
    uses, ill_formed = [], False
    for name, arguments in calls:
        parsed = _json_object(arguments)
        ill_formed |= parsed is None
        uses.append({"name": name, "input": {"_raw_arguments": arguments} if parsed is None else parsed})
    return text, uses, ill_formed


def parse_xml_tool_uses(body: str, tools_schema: ToolSchemas) -> tuple[str, list[dict[str, Any]]]:
    """Return the text without tool uses, and the tool uses, of the form
    ``<tool_call><function=NAME><parameter=P>value</parameter></function></tool_call>``.

    Values have the type that the tool's schema gives the parameter, and stay strings where they cannot have it. A name
    that no tool has is no tool use; it stays in the text.
    """
    text, uses, _ = _read_xml(body, tools_schema)
    return text, uses


def _read_xml(body: str, tools_schema: ToolSchemas) -> tuple[str, list[dict[str, Any]], bool]:
    """Also return whether the parameters of a call are not all that it has.

    A call ends where its parameters are whole: a value may hold what ends a value or a call.
    """
    schemas_of = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools_schema}
    uses: list[dict[str, Any]] = []
    texts, at, uneven = [], 0, False
    for match in _CALL_BEGIN.finditer(body):
        name = match[1].strip()
        ends = list(_CALL_END.finditer(body, match.end()))
        if match.start() < at or name not in schemas_of or not ends:
            continue
        end = next((one for one in ends if _is_whole(body[match.end() : one.start()])), None)
        uneven |= end is None
        if end is None and _CALL_BEGIN.search(body, match.end(), ends[0].start()):
            continue  # it was not finished when another began
        end = end or ends[0]
        schemas = parameter_schemas(schemas_of[name])
        inputs = {
            key.strip(): typed(value.removeprefix("\n").removesuffix("\n"), *schemas.get(key.strip(), ()))
            for key, value in _PARAMETER.findall(body[match.end() : end.start()])
        }
        uses.append({"name": name, "input": inputs})
        texts.append(body[at : match.start()])
        at = end.end()
    text = "".join([*texts, body[at:]])
    return (text.rstrip() if uses else text), uses, uneven


def _is_whole(inner: str) -> bool:
    """Return True if a call is parameters and white space."""
    return not _PARAMETER.sub("", inner).strip() and inner.count("<parameter=") <= inner.count("</parameter>")


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
