"""The gateway for agents that speak OpenAI's chat completions."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import web

from slime.agent.adapters.common import (
    DEFAULT_SID,
    BaseAdapter,
    Reply,
    flatten_content,
    sid_from_bearer,
    sid_from_body,
    tool_call_dict,
)
from slime.agent.adapters.http_requests import bad_request, messages_of
from slime.agent.adapters.provider import MODEL_LABEL, Message

logger = logging.getLogger(__name__)

_ROLES = {"system": "system", "developer": "system", "user": "user", "tool": "tool"}


class OpenAIAdapter(BaseAdapter):
    """``POST /v1/chat/completions``. The session id is the bearer token, or ``metadata.session_id`` or ``user`` of the
    body. An answer has one tool call at most."""

    max_tokens_keys = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    stop_keys = ("stop",)

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/chat/completions", self.handle_turn)
        router.add_get("/v1/models", _list_models)

    def session_id(self, request: web.Request, body: Mapping[str, Any]) -> str:
        return _request_session_id(request, body)

    def translate(self, body: Mapping[str, Any]) -> tuple[list[Message], list[Message] | None]:
        if body.get("n") not in (None, 1):
            raise bad_request(f"n must be 1, not {body['n']!r}: a session is one conversation")
        return _translate_messages(messages_of(body)), _tools(body.get("tools"))

    def reply_message(self, reply: Reply) -> Message:
        message: Message = {"role": "assistant", "content": reply.text}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        for use in reply.tool_uses[:1]:
            function = {"name": use["name"], "arguments": _arguments_text(use["input"])}
            message["content"] = None
            message["tool_calls"] = [{"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}]
        return message

    def translate_reply(self, message: Message) -> Message:
        return _assistant_message(message)

    def tree_messages(self, messages: list[Message]) -> list[Message]:
        """Few clients send the reasoning back."""
        return [{key: value for key, value in m.items() if key != "reasoning_content"} for m in messages]

    def reply_body(self, message: Message, reply: Reply, model: str) -> dict[str, Any]:
        used = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.output_tokens}
        return {
            "id": f"chatcmpl_{uuid.uuid4().hex[:24]}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": reply.finish_reason, "logprobs": None}],
            "usage": {**used, "total_tokens": sum(used.values())},
        }

    def reply_events(self, body: dict[str, Any]) -> Iterable[bytes]:
        choice = body["choices"][0]
        message = choice["message"]
        deltas: list[Message] = [{"role": "assistant", "content": ""}]
        if message.get("reasoning_content"):
            deltas.append({"reasoning_content": message["reasoning_content"]})
        if message["content"]:
            deltas.append({"content": message["content"]})
        deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(message.get("tool_calls") or [])]
        head = {key: body[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        for delta in deltas:
            yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
        yield _event({**head, "choices": [last], "usage": body["usage"]})
        yield b"data: [DONE]\n\n"

    def error_body(self, kind: str, message: str) -> dict[str, Any]:
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _request_session_id(request: web.Request, body: Mapping[str, Any]) -> str:
    return sid_from_bearer(request) or sid_from_body(body) or DEFAULT_SID


def _translate_messages(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """The messages of a request as chat messages, ids of tool calls dropped, arguments as objects."""
    translated: list[Message] = []
    for message in messages:
        role = message["role"]
        if role == "assistant":
            translated.append(_assistant_message(message))
        elif role in _ROLES:
            translated.append({"role": _ROLES[role], "content": flatten_content(message.get("content"))})
        else:
            logger.warning("a message of role %r is left out", role)
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


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise bad_request("a tool call must be an object with a function")
    return tool_call_dict(str(function.get("name") or ""), _arguments_object(function.get("arguments")))


def _arguments_object(arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, TypeError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"_raw_arguments": arguments}


def _arguments_text(arguments: dict[str, Any]) -> str:
    """What ``_arguments_object`` makes the same object of again."""
    raw = arguments.get("_raw_arguments")
    return raw if isinstance(raw, str) and len(arguments) == 1 else json.dumps(arguments)


def _tools(tools: Any) -> list[Message] | None:
    if tools is None:
        return None
    for place, tool in enumerate(tools if isinstance(tools, list) else [tools]):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise bad_request(f"tools[{place}] must be an object with a function that has a name")
    return list(tools)


async def _list_models(request: web.Request) -> web.Response:
    model = {"id": MODEL_LABEL, "object": "model", "created": 0, "owned_by": "slime"}
    return web.json_response({"object": "list", "data": [model]})


def _event(chunk: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()
