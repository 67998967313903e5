"""Parses what a model wrote: reasoning, text for the user, and tool uses.

Models have their own formats; SGLang's parsers know them by name. One format is parsed here without SGLang.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.agent import sglang_parsers

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
    start = suspicious_start(body, len(uses)) if uses else None
    if start is None:
        return text, uses, ill_formed
    before, earlier, _ = _by_sglang(body[:start], tools_schema, parser_name)
    if len(uses) > len(earlier) and not is_cut(body[start:]):
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


# Values that a model wrote without quotes, typed by the tool's JSON schema

MAX_DEPTH = 32
"""Schemas may refer to themselves."""
_ALL = frozenset({"null", "boolean", "integer", "number", "object", "array", "string"})
_KIND_OF = {type(None): "null", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def parameter_schemas(schema: object) -> dict[str, tuple[Any, Any]]:
    """Each parameter's schema, with the whole one, where references are looked up; whatever an agent sent as one."""
    found = {}
    for part in _parts(schema, schema, MAX_DEPTH):
        properties = part.get("properties")
        if isinstance(properties, Mapping):
            found.update({name: (one, schema) for name, one in properties.items()})
    return found


def typed(value: str, schema: object = None, root: object = None) -> Any:
    """``value`` as a member of the schema's ``enum`` or ``const``, or as JSON of a type that it allows; as it is
    where it is neither, or the schema says nothing."""
    for member in _members(schema, root, MAX_DEPTH):
        if value == (member if isinstance(member, str) else json.dumps(member)):
            return member
    kinds = _kinds(schema, root, MAX_DEPTH)
    if kinds == _ALL:
        return value
    try:
        found = json.loads(value if value.lower() not in ("true", "false") else value.lower(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None if value.strip() == "None" and "null" in kinds and "string" not in kinds else value
    kind = _KIND_OF.get(type(found), "string")
    if kind == "number" and found.is_integer() and "integer" in kinds and "number" not in kinds:
        return int(found)
    return found if kind in kinds or (kind == "integer" and "number" in kinds) else value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _resolved(schema: Any, root: object) -> Any:
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or not reference.startswith("#"):
        return schema
    found = root
    for step in reference.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return {**found, **{k: v for k, v in schema.items() if k != "$ref"}} if isinstance(found, Mapping) else {}


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _parts(schema: object, root: object, depth: int) -> Iterator[Mapping[str, Any]]:
    """The schema and all that it is made of."""
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping) or not depth:
        return
    yield schema
    for one in (*_listed(schema, "allOf"), *_listed(schema, "anyOf"), *_listed(schema, "oneOf")):
        yield from _parts(one, root, depth - 1)


def _members(schema: object, root: object, depth: int) -> Iterator[Any]:
    for part in _parts(schema, root, depth):
        yield from _listed(part, "enum")
        if "const" in part:
            yield part["const"]


def _kinds(schema: object, root: object, depth: int) -> frozenset[str]:
    """The types that a value may have: all of them where none are given."""
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping) or not depth:
        return _ALL
    named = schema.get("type")
    kinds = frozenset(one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str))
    kinds = kinds & _ALL or _ALL
    for key in ("anyOf", "oneOf"):
        if alternatives := _listed(schema, key):
            kinds &= frozenset().union(*(_kinds(one, root, depth - 1) for one in alternatives))
    for one in _listed(schema, "allOf"):
        kinds &= _kinds(one, root, depth - 1)
    members = [*_listed(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
    if members:
        kinds &= frozenset(_KIND_OF.get(type(member), "string") for member in members)
    if kinds == _ALL:
        implied = [kind for key, kind in (("properties", "object"), ("items", "array")) if key in schema]
        kinds = frozenset(implied) or _ALL
    return kinds | {"null"} if schema.get("nullable") is True and kinds != _ALL else kinds


# Tool calls that a model began and that cannot be read, beside others that can. SGLang's parsers pass over them in
# silence, and some read a call that was cut as far as it goes.

_BEGINS = (
    "<tool_call>", "<function=", "<function name=", "<invoke name=", "<|tool_call>", "<|tool_call_begin|>",
    "<｜tool_call_begin｜>", "<｜tool▁call▁begin｜>", "<｜DSML｜invoke ", "<ifm|tool_call>",
)  # fmt: skip
"""The beginnings of one call, of the formats that mark calls."""
_PAIRS = (
    ("<function=", "</function>"), ("<function name=", "</function>"), ("<invoke name=", "</invoke>"),
    ("<parameter=", "</parameter>"), ("<parameter name=", "</parameter>"), ("<param name=", "</param>"),
    ("<arg_value>", "</arg_value>"), ("<ifm|arg_value>", "</ifm|arg_value>"),
    ("<steptml:parameter ", "</steptml:parameter>"), ("<｜DSML｜parameter ", "</｜DSML｜parameter>"),
)  # fmt: skip
"""The parts of a call: begin and end."""
_PYTHON_TAG = "<|python_tag|>"
_NEXT_JSON = re.compile(r";\s*\{")
"""Between the calls of Llama 3, which marks only the first."""


def suspicious_start(body: str, calls: int) -> int | None:
    """Return where the last call of ``body`` begins, if more were begun than the ``calls`` that were read, or one was
    cut; else where the part of a marker at its end does; None if it has no such part."""
    begins = [body.rfind(begin) for begin in _BEGINS if begin in body]
    begun = max(body.count(begin) for begin in _BEGINS)
    if body.startswith(_PYTHON_TAG):
        begins = [match.start() for match in _NEXT_JSON.finditer(body)]
        begun = 1 + len(begins)
    uneven = any(begin in body and body.count(begin) != body.count(end) for begin, end in _PAIRS)
    if begins and (begun > calls or uneven):
        last = max(begins)
        return last if body[last] == ";" else min(place for place in begins if "</" not in body[place:last])
    partial = _begun_marker(body)
    return len(body) - partial if partial else None


def _begun_marker(body: str) -> int:
    """The length of the longest part of a marker that ``body`` ends with."""
    lengths = [length for begin in _BEGINS for length in range(1, len(begin)) if body.endswith(begin[:length])]
    return max(lengths, default=0)


def is_cut(call: str) -> bool:
    """Return True if a part of the call that ``call`` begins with does not end."""
    return any(call.count(begin) > call.count(end) for begin, end in _PAIRS)
