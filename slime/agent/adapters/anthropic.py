"""The gateway for agents that speak Anthropic's Messages API, such as Claude Code."""

from __future__ import annotations

import json
import logging
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
    tool_call_dict,
)
from slime.agent.adapters.errors import bad_request
from slime.agent.adapters.http_requests import messages_of
from slime.agent.adapters.provider import Message

logger = logging.getLogger(__name__)

_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}


class AnthropicAdapter(BaseAdapter):
    """``POST /v1/messages``. The session id is the bearer token or ``X-Api-Key``."""

    max_tokens_keys = ("max_tokens",)
    stop_keys = ("stop_sequences",)

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/messages", self.handle_turn)
        router.add_post("/v1/messages/count_tokens", _count_no_tokens)

    def session_id(self, request: web.Request, body: Mapping[str, Any]) -> str:
        return _request_session_id(request)

    def translate(self, body: Mapping[str, Any]) -> tuple[list[Message], list[Message] | None]:
        return _translate_messages(body), _tools_to_chat_tools(body.get("tools"))

    def reply_message(self, reply: Reply) -> Message:
        blocks: list[Message] = []
        if reply.reasoning:
            blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
        if reply.text or not (reply.reasoning or reply.tool_uses):
            blocks.append({"type": "text", "text": reply.text})
        for use in reply.tool_uses:
            name = {"id": f"toolu_{uuid.uuid4().hex[:24]}", "name": use["name"]}
            blocks.append({"type": "tool_use", **name, "input": use["input"]})
        return {"role": "assistant", "content": blocks}

    def translate_reply(self, message: Message) -> Message:
        return _assistant_message(message["content"])

    def tree_messages(self, messages: list[Message]) -> list[Message]:
        return messages

    def reply_body(self, message: Message, reply: Reply, model: str) -> dict[str, Any]:
        return {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": message["content"],
            "stop_reason": _STOP_REASONS[reply.finish_reason],
            "stop_sequence": None,
            "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.output_tokens},
        }

    def reply_events(self, body: dict[str, Any]) -> Iterable[bytes]:
        begun = {**body, "content": [], "stop_reason": None, "usage": {**body["usage"], "output_tokens": 0}}
        yield _event("message_start", message=begun)
        for index, block in enumerate(body["content"]):
            empty, deltas = _block_events(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        delta = {"stop_reason": body["stop_reason"], "stop_sequence": None}
        yield _event("message_delta", delta=delta, usage={"output_tokens": body["usage"]["output_tokens"]})
        yield _event("message_stop")

    def error_body(self, kind: str, message: str) -> dict[str, Any]:
        return {"type": "error", "error": {"type": kind, "message": message}}


def _request_session_id(request: web.Request) -> str:
    return sid_from_bearer(request) or request.headers.get("X-Api-Key", "").strip() or DEFAULT_SID


def _translate_messages(body: Mapping[str, Any]) -> list[Message]:
    """The system prompt and the messages of a request as chat messages, ids of tool uses dropped."""
    translated: list[Message] = []
    system = flatten_content(body.get("system"))
    if system:
        translated.append({"role": "system", "content": system})
    for message in messages_of(body):
        role, content = message["role"], message.get("content")
        if role == "assistant":
            translated.append(_assistant_message(content))
        elif role == "system":
            translated.append({"role": "system", "content": flatten_content(content)})
        elif role == "user":
            translated.extend(_user_messages(content))
        else:
            raise bad_request(f"role {role!r} is not user, assistant or system")
    return _fold_mid_list_system_into_user(translated)


def _user_messages(content: Any) -> list[Message]:
    """Tool results become messages of their own, in their place among the texts."""
    messages: list[Message] = []
    texts: list[Any] = []
    blocks = content if isinstance(content, list) else [content]
    for block in blocks:
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            if texts:
                messages.append({"role": "user", "content": flatten_content(texts)})
                texts = []
            messages.append({"role": "tool", "content": flatten_content(block.get("content"))})
        elif block is not None:
            texts.append(block)
    if texts or not messages:
        messages.append({"role": "user", "content": flatten_content(texts)})
    return messages


def _assistant_message(content: Any) -> Message:
    blocks = content if isinstance(content, list) else [{"type": "text", "text": flatten_content(content)}]
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            arguments = block.get("input") or {}
            if not isinstance(arguments, dict):
                raise bad_request("the input of a tool_use must be an object")
            calls.append(tool_call_dict(str(block.get("name") or ""), arguments))
        else:
            texts.append(block)
    message: Message = {"role": "assistant", "content": flatten_content(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _fold_mid_list_system_into_user(messages: list[Message]) -> list[Message]:
    """System messages after the first place become a reminder in the user message after or, without one, before them:
    chat templates take a system message only at the beginning."""
    folded: list[Message] = []
    waiting = ""
    for place, message in enumerate(messages):
        if message["role"] == "system" and place > 0:
            waiting += f"<system-reminder>\n{message['content']}\n</system-reminder>\n"
            continue
        if waiting and message["role"] == "user":
            message, waiting = {**message, "content": waiting + message["content"]}, ""
        elif waiting:
            _append_reminder(folded, waiting)
            waiting = ""
        folded.append(message)
    if waiting:
        _append_reminder(folded, waiting)
    return folded


def _append_reminder(folded: list[Message], reminder: str) -> None:
    if folded[-1]["role"] == "user":
        folded[-1] = {**folded[-1], "content": f"{folded[-1]['content']}\n{reminder}"}
    else:
        folded.append({"role": "user", "content": reminder})


def _tools_to_chat_tools(tools: Any) -> list[Message] | None:
    """Tools with a schema as chat templates take them; those that the provider would run itself are left out."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(
        isinstance(tool, Mapping) and isinstance(tool.get("name"), str) for tool in tools
    ):
        raise bad_request("tools must be a list of objects with a name")
    left_out = [tool["name"] for tool in tools if "input_schema" not in tool]
    if left_out:
        logger.warning("tools without an input_schema are left out: %s", ", ".join(left_out))
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool["input_schema"],
            },
        }
        for tool in tools
        if "input_schema" in tool
    ]


def _block_events(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A content block as it begins, and the changes that complete it."""
    if block["type"] == "thinking":
        thinking = {"type": "thinking_delta", "thinking": block["thinking"]}
        return {**block, "thinking": ""}, [thinking, {"type": "signature_delta", "signature": block["signature"]}]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


async def _count_no_tokens(request: web.Request) -> web.Response:
    return web.json_response({"input_tokens": 0})
