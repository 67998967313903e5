"""OpenAI's Responses API, which Codex and ``openai-agents`` speak: items in, items out."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import web

from slime.agent.adapters.anthropic import _fold_mid_list_system_into_user
from slime.agent.adapters.common import (
    DEFAULT_SID,
    Reply,
    content_of,
    flatten_content,
    sid_from_bearer,
    sid_from_body,
    tool_call_dict,
)
from slime.agent.adapters.event_stream import event
from slime.agent.adapters.http_requests import CONTEXT_EXCEEDED, bad_request, told
from slime.agent.adapters.openai_common import arguments_object, arguments_text, openai_error
from slime.agent.adapters.provider import Message, ParsedRequest, ProviderFormat
from slime.agent.same_answer import ToolCall

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": None,
    "temperature": None,
    "text": None,
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
}
"""Fields of a request that its response repeats, and their defaults."""
_STATEFUL = ("previous_response_id", "conversation", "background")
_FREE_FORM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_ERROR_CODES = {
    CONTEXT_EXCEEDED: CONTEXT_EXCEEDED,
    "invalid_request_error": "invalid_prompt",
    "rate_limit_error": "rate_limit_exceeded",
    "overloaded_error": "server_is_overloaded",
}
_CALL_ID = re.compile(r"(call_[0-9a-f]{20})_\d+")
_CALLS = {"function_call": "arguments", "custom_tool_call": "input", "local_shell_call": "action"}
"""The items that call a tool, and the field of each that has the arguments."""


class ResponsesFormat(ProviderFormat):
    """``POST /v1/responses``, without state: every request has the whole history."""

    def session_id(self, request: web.Request, body: Mapping[str, Any]) -> str:
        return sid_from_bearer(request) or sid_from_body(body) or DEFAULT_SID

    def translate(self, body: Mapping[str, Any]) -> tuple[list[Message], list[Message] | None]:
        for key in _STATEFUL:
            if body.get(key):
                raise bad_request(f"{key} is not supported: nothing is stored here, send the whole history as input")
        messages = _messages(_items(body.get("input")))
        if body.get("instructions"):
            messages.insert(0, {"role": "system", "content": flatten_content(body["instructions"])})
        _fold_mid_list_system_into_user({"messages": messages})
        return messages, _tools(body.get("tools"))

    def reply_message(self, reply: Reply, body: Mapping[str, Any]) -> Message:
        tools = body.get("tools") or []
        custom = {tool.get("name") for tool in tools if tool.get("type") == "custom"}
        turn = uuid.uuid4().hex[:20]
        items: list[Message] = []
        if reply.reasoning:
            thought = {"type": "reasoning_text", "text": reply.reasoning}
            items.append({"id": f"rs_{turn}", "type": "reasoning", "summary": [], "content": [thought]})
        if reply.text or not (reply.reasoning or reply.tool_uses):
            text: dict[str, Any] = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
            message = {"type": "message", "role": "assistant", "status": "completed"}
            items.append({"id": f"msg_{turn}", **message, "content": [text]})
        for place, use in enumerate(reply.tool_uses):
            # calls of one answer have one id but for its end: clients may put the results between them
            call = {"call_id": f"call_{turn}_{place}", "name": use["name"], "status": "completed"}
            if use["name"] in custom:
                call |= {"id": f"ctc_{turn}_{place}", "type": "custom_tool_call", "input": _free_form(use["input"])}
            else:
                arguments = arguments_text(use["input"])
                call |= {"id": f"fc_{turn}_{place}", "type": "function_call", "arguments": arguments}
            items.append(call)
        return {"role": "assistant", "items": items}

    def translate_reply(self, message: Message) -> Message:
        return _messages(message["items"])[0]

    def reply_body(self, message: Message, reply: Reply, asked: ParsedRequest) -> dict[str, Any]:
        cut = reply.finish_reason == "length"
        usage = {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens},
            "output_tokens": reply.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.output_tokens,
        }
        return {
            **_response(asked, "incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": message["items"],
            "usage": usage,
        }

    def opening_events(self, asked: ParsedRequest) -> Iterable[bytes]:
        yield event("response.created", sequence_number=next(asked.numbers), response=_response(asked, "in_progress"))
        yield self.keep_alive(asked)

    def keep_alive(self, asked: ParsedRequest) -> bytes:
        """An event: Codex takes a stream of comments for one that has broken off, after five minutes."""
        return event(
            "response.in_progress", sequence_number=next(asked.numbers), response=_response(asked, "in_progress")
        )

    def reply_events(self, body: dict[str, Any], asked: ParsedRequest) -> Iterable[bytes]:
        events = [fields for place, item in enumerate(body["output"]) for fields in _item_events(place, item)]
        # also of one that was cut: clients take a stream that ends otherwise for broken, and ask again
        events.append(("response.completed", {"response": body}))
        for kind, fields in events:
            yield event(kind, sequence_number=next(asked.numbers), **fields)

    def error_event(self, kind: str, message: str, asked: ParsedRequest) -> bytes:
        error = {"code": _ERROR_CODES.get(kind, "server_error"), "message": message}
        response = {**_response(asked, "failed"), "error": error}
        return event("response.failed", sequence_number=next(asked.numbers), response=response)

    def error_body(self, kind: str, message: str) -> dict[str, Any]:
        return openai_error(kind, message)


def _response(asked: ParsedRequest, status: str) -> dict[str, Any]:
    repeated = {key: asked.body.get(key, default) for key, default in _REPEATED.items()}
    return {
        "id": f"resp_{asked.id}",
        "object": "response",
        "created_at": asked.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": asked.model,
        "output": [],
        "usage": None,
        "store": False,
        "previous_response_id": None,
        **repeated,
    }


def _item_events(place: int, item: Message) -> Iterable[tuple[str, dict[str, Any]]]:
    """The events of one item of the output, by name."""
    at = {"output_index": place, "item_id": item["id"]}

    def added(**empty: object) -> tuple[str, dict[str, Any]]:
        begun = {**item, **empty, **({"status": "in_progress"} if "status" in item else {})}
        return "response.output_item.added", {"output_index": place, "item": begun}

    if item["type"] in ("message", "reasoning"):
        yield added(content=[])
        kind = "output_text" if item["type"] == "message" else "reasoning_text"
        for index, part in enumerate(item["content"]):
            at_part: dict[str, Any] = {**at, "content_index": index}
            extra: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
            yield "response.content_part.added", {**at_part, "part": {**part, "text": ""}}
            yield f"response.{kind}.delta", {**at_part, "delta": part["text"], **extra}
            yield f"response.{kind}.done", {**at_part, "text": part["text"], **extra}
            yield "response.content_part.done", {**at_part, "part": part}
    else:
        field = _CALLS[item["type"]]
        kind = "function_call_arguments" if item["type"] == "function_call" else "custom_tool_call_input"
        yield added(**{field: ""})
        yield f"response.{kind}.delta", {**at, "delta": item[field]}
        name = {"name": item["name"]} if item["type"] == "function_call" else {}
        yield f"response.{kind}.done", {**at, **name, field: item[field]}
    yield "response.output_item.done", {"output_index": place, "item": item}


def _items(given: object) -> list[Mapping[str, Any]]:
    """The items of a request; a string is a message of the user."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise bad_request("input must be a string or a list with at least one item")
    for place, item in enumerate(given):
        if not isinstance(item, Mapping):
            raise bad_request(f"input[{place}] must be an object")
    return given


def _messages(items: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Items as chat messages: the reasoning, text and calls of one answer are one message."""
    messages: list[Message] = []
    answer: Message | None = None
    """The assistant message that the next item may belong to."""
    answer_id = reasoning = ""

    def new_answer(content: str = "") -> Message:
        nonlocal reasoning
        messages.append({"role": "assistant", "content": content})
        if reasoning:
            messages[-1]["reasoning_content"] = reasoning
        reasoning = ""
        return messages[-1]

    def add(message: Message) -> None:
        if reasoning:  # all that the answer before had
            new_answer()
        messages.append(message)

    for item in items:
        kind = str(item.get("type") or "message")
        if kind == "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                raise bad_request(f"role {item.get('role')!r} is not user, assistant, system or developer")
            if role == "assistant":
                answer, answer_id = new_answer(flatten_content(item.get("content"))), ""
            else:
                read = content_of if role == "user" else flatten_content
                add({"role": role, "content": read(item.get("content"))})
                answer = None
        elif kind in _CALLS:
            ours = _CALL_ID.fullmatch(str(item.get("call_id")))
            together = answer is not None and (messages[-1] is answer or (ours and ours[1] == answer_id))
            if answer is None or not together or reasoning:
                answer = new_answer()
            answer.setdefault("tool_calls", []).append(_tool_call(kind, item))
            answer_id = ours[1] if ours else ""
        elif kind.endswith("_call_output"):
            add({"role": "tool", "content": content_of(item.get("output"))})
        elif kind == "reasoning":
            reasoning = flatten_content(item.get("content") or item.get("summary"))
        elif kind == "item_reference":
            raise bad_request("item_reference is not supported: nothing is stored here, send the items themselves")
        else:
            told.tell("an input item of type %r is left out", kind)
    if reasoning:
        new_answer()
    if not messages:
        raise bad_request("input has no item that is understood")
    return messages


def _tool_call(kind: str, item: Mapping[str, Any]) -> dict[str, Any]:
    given = item.get(_CALLS[kind])
    arguments = {"input": given if isinstance(given, str) else ""} if kind == "custom_tool_call" else None
    name = str(item.get("name") or ("local_shell" if kind == "local_shell_call" else ""))
    called = tool_call_dict(name, arguments_object(given) if arguments is None else arguments)
    return ToolCall.named(called, item.get("call_id"))


def _free_form(arguments: Mapping[str, Any]) -> str:
    """The text for a tool that takes text; of a call that was not made so, its arguments."""
    text = arguments.get("input")
    return text if isinstance(text, str) and len(arguments) == 1 else json.dumps(arguments)


def _tools(tools: object) -> list[Message] | None:
    """Functions and custom tools as chat templates take them; those that the provider would run itself, and namespaces,
    are left out."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise bad_request("tools must be a list of objects")
    found = []
    for place, tool in enumerate(tools):
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            told.tell("a tool of type %r is left out: it is neither a function nor a custom tool", kind)
            continue
        if not isinstance(tool.get("name"), str):
            raise bad_request(f"tools[{place}] must have a name")
        function = {"name": tool["name"], "description": tool.get("description") or ""}
        parameters = _FREE_FORM if kind == "custom" else tool.get("parameters") or {"type": "object", "properties": {}}
        found.append({"type": "function", "function": {**function, "parameters": parameters}})
    return found
