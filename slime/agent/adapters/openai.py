"""The gateway for agents that speak OpenAI's chat completions or Responses API."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from aiohttp import web

from slime.agent.adapters.common import (
    DEFAULT_SID,
    BaseAdapter,
    Reply,
    content_of,
    flatten_content,
    sid_from_bearer,
    sid_from_body,
    tool_call_dict,
)
from slime.agent.adapters.http_requests import bad_request, messages_of, told
from slime.agent.adapters.openai_common import arguments_object, arguments_text, list_models, openai_error
from slime.agent.adapters.provider import Message, ParsedRequest
from slime.agent.adapters.responses import ResponsesFormat
from slime.agent.same_answer import ToolCall

_ROLES = {"system": "system", "developer": "system", "user": "user", "tool": "tool"}


class OpenAIAdapter(BaseAdapter):
    """``POST /v1/chat/completions`` and ``/v1/responses``. The session id is the bearer token, or in the body
    (``sid_from_body``). An answer of chat completions has one tool call at most."""

    max_tokens_keys = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    stop_keys: ClassVar[tuple[str, ...]] = ("stop",)

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/chat/completions", self.handle_turn)
        router.add_post("/v1/responses", self.answering(ResponsesFormat()))
        router.add_get("/v1/models", self.list_models)

    async def list_models(self, request: web.Request) -> web.Response:
        """Answer with the only model."""
        return await list_models(request)

    def session_id(self, request: web.Request, body: Mapping[str, Any]) -> str:
        return _request_session_id(request, body)

    def translate(self, body: Mapping[str, Any]) -> tuple[list[Message], list[Message] | None]:
        if body.get("n") not in (None, 1):
            raise bad_request(f"n must be 1, not {body['n']!r}: a session is one conversation")
        return _translate_messages(messages_of(body)), _tools(body.get("tools"))

    def reply_message(self, reply: Reply, body: Mapping[str, Any]) -> Message:
        message: Message = {"role": "assistant", "content": reply.text}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        for use in reply.tool_uses[:1]:
            function = {"name": use["name"], "arguments": arguments_text(use["input"])}
            message["content"] = reply.text if reply.text.strip() else None
            message["tool_calls"] = [{"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}]
        return message

    def translate_reply(self, message: Message) -> Message:
        return _assistant_message(message)

    def reply_body(self, message: Message, reply: Reply, asked: ParsedRequest) -> dict[str, Any]:
        used = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.output_tokens}
        choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason, "logprobs": None}
        return {
            **_head(asked, "chat.completion"),
            "choices": [choice],
            "usage": {
                **used,
                "total_tokens": sum(used.values()),
                "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
            },
        }

    def opening_events(self, asked: ParsedRequest) -> Iterable[bytes]:
        yield _chunk(_head(asked), {"role": "assistant", "content": ""})

    def reply_events(self, body: dict[str, Any], asked: ParsedRequest) -> Iterable[bytes]:
        choice = body["choices"][0]
        message = choice["message"]
        deltas: list[Message] = []
        if message.get("reasoning_content"):
            deltas.append({"reasoning_content": message["reasoning_content"]})
        if message["content"]:
            deltas.append({"content": message["content"]})
        deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(message.get("tool_calls") or [])]
        head = {key: body[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        for delta in deltas:
            yield _chunk(head, delta)
        yield _chunk({**head, "usage": body["usage"]}, {}, choice["finish_reason"])
        yield b"data: [DONE]\n\n"

    def error_event(self, kind: str, message: str, asked: ParsedRequest) -> bytes:
        return f"data: {json.dumps(self.error_body(kind, message))}\n\n".encode()

    def error_body(self, kind: str, message: str) -> dict[str, Any]:
        return openai_error(kind, message)


def _head(asked: ParsedRequest, kind: str = "chat.completion.chunk") -> dict[str, Any]:
    return {"id": f"chatcmpl_{asked.id}", "object": kind, "created": asked.created, "model": asked.model}


def _chunk(head: Mapping[str, Any], delta: Message, finish_reason: str | None = None) -> bytes:
    chunk = {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}
    return f"data: {json.dumps(chunk)}\n\n".encode()


def _request_session_id(request: web.Request, body: Mapping[str, Any]) -> str:
    return sid_from_bearer(request) or sid_from_body(body) or DEFAULT_SID


def _translate_messages(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """The messages of a request as chat messages, without ids of tool calls for templates, arguments as objects."""
    translated: list[Message] = []
    for message in messages:
        role = message["role"]
        if role == "assistant":
            translated.append(_assistant_message(message))
        elif role in _ROLES:
            content = flatten_content if _ROLES[role] == "system" else content_of
            translated.append({"role": _ROLES[role], "content": content(message.get("content"))})
        else:
            told.tell("a message of role %r is left out", role)
    return translated


def _assistant_message(message: Mapping[str, Any]) -> Message:
    translated: Message = {"role": "assistant", "content": flatten_content(message.get("content"))}
    if isinstance(message.get("reasoning_content"), str) and message["reasoning_content"]:
        translated["reasoning_content"] = message["reasoning_content"]
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise bad_request("tool_calls must be a list")
    if calls:
        translated["tool_calls"] = [_tool_call(call) for call in calls]
    return translated


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise bad_request("a tool call must be an object with a function")
    called = tool_call_dict(str(function.get("name") or ""), arguments_object(function.get("arguments")))
    return ToolCall.named(called, call.get("id"))


def _tools(tools: list[Any] | None) -> list[Message] | None:
    if tools is None:
        return None
    for place, tool in enumerate(tools if isinstance(tools, list) else [tools]):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise bad_request(f"tools[{place}] must be an object with a function that has a name")
    return list(tools)
