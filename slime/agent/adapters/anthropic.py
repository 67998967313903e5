"""The gateway for agents that speak Anthropic's Messages API, such as Claude Code."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import web

from slime.agent.adapters.common import (
    DEFAULT_SID,
    BaseAdapter,
    Reply,
    content_of,
    flatten_content,
    sid_from_bearer,
    tool_call_dict,
)
from slime.agent.adapters.event_stream import event
from slime.agent.adapters.http_requests import CONTEXT_EXCEEDED, bad_request, messages_of, told
from slime.agent.adapters.provider import MODEL_LABEL, Message, ParsedRequest, ProviderFormat
from slime.agent.same_answer import ToolCall

BILLING_HEADER = "x-anthropic-billing-header:"
_EMPTY_SCHEMA = {"type": "object", "properties": {}}
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}


class AnthropicFormat(ProviderFormat):
    """The Messages API."""

    def session_id(self, request: web.Request, body: Mapping[str, Any]) -> str:
        sid = _request_session_id(request)
        return sid if sid != DEFAULT_SID else _claude_code_session(request, body) or sid

    def translate(self, body: Mapping[str, Any]) -> tuple[list[Message], list[Message] | None]:
        messages_of(body)  # refused unless they are messages
        _fold_mid_list_system_into_user(body)
        return _translate_messages(body["messages"], body.get("system")), _tools_to_chat_tools(body.get("tools"))

    def reply_message(self, reply: Reply, body: Mapping[str, Any]) -> Message:
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

    def reply_body(self, message: Message, reply: Reply, asked: ParsedRequest) -> dict[str, Any]:
        return {
            **_head(asked),
            "content": message["content"],
            "stop_reason": _STOP_REASONS[reply.finish_reason],
            "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.output_tokens},
        }

    def opening_events(self, asked: ParsedRequest) -> Iterable[bytes]:
        usage = {"input_tokens": asked.prompt_tokens, "output_tokens": 0}
        yield event("message_start", message={**_head(asked), "content": [], "stop_reason": None, "usage": usage})

    def keep_alive(self, asked: ParsedRequest) -> bytes:
        return event("ping")

    def reply_events(self, body: dict[str, Any], asked: ParsedRequest) -> Iterable[bytes]:
        for index, block in enumerate(body["content"]):
            empty, deltas = _block_events(block)
            yield event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield event("content_block_delta", index=index, delta=delta)
            yield event("content_block_stop", index=index)
        delta = {"stop_reason": body["stop_reason"], "stop_sequence": None}
        yield event("message_delta", delta=delta, usage={"output_tokens": body["usage"]["output_tokens"]})
        yield event("message_stop")

    def error_event(self, kind: str, message: str, asked: ParsedRequest) -> bytes:
        return event("error", error=self.error_body(kind, message)["error"])

    def error_body(self, kind: str, message: str) -> dict[str, Any]:
        kind = "invalid_request_error" if kind == CONTEXT_EXCEEDED else kind
        return {"type": "error", "error": {"type": kind, "message": message}}


class AnthropicAdapter(AnthropicFormat, BaseAdapter):
    """``POST /v1/messages``. The session id is the bearer token or ``X-Api-Key``, else the one of Claude Code's own."""

    max_tokens_keys = ("max_tokens",)
    stop_keys = ("stop_sequences",)

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/messages", self.handle_turn)
        router.add_post("/v1/messages/count_tokens", self.handle_count_tokens)
        router.add_get("/v1/models", list_models)


def _head(asked: ParsedRequest) -> dict[str, Any]:
    head = {"type": "message", "role": "assistant", "model": asked.model, "stop_sequence": None}
    return {"id": f"msg_{asked.id}", **head}


def _request_session_id(request: web.Request) -> str:
    return sid_from_bearer(request) or request.headers.get("X-Api-Key", "").strip() or DEFAULT_SID


def _claude_code_session(request: web.Request, body: Mapping[str, Any]) -> str | None:
    """The id that Claude Code gives its own session: in a header, or at the end of ``metadata.user_id``, which is
    ``user_..._account_..._session_...`` or an object in JSON."""
    if header := request.headers.get("X-Claude-Code-Session-Id", "").strip():
        return header
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    if not isinstance(user, str):
        return None
    try:
        found = json.loads(user)
    except ValueError:
        found = None
    sid = found.get("session_id") if isinstance(found, dict) else user.rpartition("_session_")[2]
    return sid if isinstance(sid, str) and sid and sid != user else None


def _translate_messages(messages: Iterable[Mapping[str, Any]], system: object = None) -> list[Message]:
    """The system prompt and the messages of a request as chat messages, without ids of tool uses for templates."""
    translated: list[Message] = []
    prompt = _system_prompt(system)
    if prompt:
        translated.append({"role": "system", "content": prompt})
    for message in messages:
        role, content = message["role"], message.get("content")
        if role == "assistant":
            translated.append(_assistant_message(content))
        elif role == "system":
            translated.append({"role": "system", "content": flatten_content(content)})
        elif role == "user":
            translated.extend(_user_messages(content))
        else:
            raise bad_request(f"role {role!r} is not user, assistant or system")
    return translated


def _system_prompt(system: object) -> str:
    """Its text, without Claude Code's line for billing: that one is different in every request, so that no two turns
    would begin alike."""
    if not isinstance(system, list):
        return _without_billing_line(flatten_content(system))
    texts = [_without_billing_line(flatten_content([block])) for block in system]
    return "\n".join(text for text in texts if text)


def _without_billing_line(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING_HEADER) else text


def _user_messages(content: object) -> list[Message]:
    """Tool results become separate messages, in their place among the texts."""
    messages: list[Message] = []
    texts: list[Any] = []
    for block in _blocks(content):
        if _is_tool_result(block):
            if texts:
                messages.append({"role": "user", "content": content_of(texts)})
                texts = []
            messages.append({"role": "tool", "content": content_of(block.get("content"))})
        elif block is not None:
            texts.append(block)
    if texts or not messages:
        messages.append({"role": "user", "content": content_of(texts)})
    return messages


def _assistant_message(content: object) -> Message:
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
            calls.append(ToolCall.named(tool_call_dict(str(block.get("name") or ""), arguments), block.get("id")))
        else:
            texts.append(block)
    message: Message = {"role": "assistant", "content": flatten_content(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _fold_mid_list_system_into_user(body: Mapping[str, Any]) -> bool:
    """Replace the system messages in ``body["messages"]`` by reminders in user messages; return whether there were any.

    Chat templates take a system message only at the beginning: the first message stays one when the body has no
    ``system``. A reminder goes to the end of the user message just before it, so that later turns begin as this one;
    else into the next message if that is the user's, or into a new one.
    """
    messages, has_prompt = body["messages"], bool(_system_prompt(body.get("system")))
    folded: list[dict[str, Any]] = []
    waiting, changed = "", False
    for message in messages:
        role = message.get("role")
        if role == "system" and (folded or waiting or has_prompt):
            changed = True
            reminder = f"<system-reminder>\n{flatten_content(message.get('content'))}\n</system-reminder>\n"
            if folded and folded[-1].get("role") == "user":
                folded[-1] = _with_reminder_after(folded[-1], reminder)
            else:
                waiting += reminder
            continue
        if waiting and role == "user":
            message = _with_reminder_before(message, waiting)
        elif waiting:
            folded.append({"role": "user", "content": waiting})
        waiting = ""
        folded.append(message)
    if waiting:
        folded.append({"role": "user", "content": waiting})
    messages[:] = folded
    return changed


def _with_reminder_after(message: dict[str, Any], reminder: str) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": f"{content}\n{reminder}"}
    return {**message, "content": [*_blocks(content), {"type": "text", "text": reminder}]}


def _with_reminder_before(message: dict[str, Any], reminder: str) -> dict[str, Any]:
    """The results of tools stay first: they belong right after the calls."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": reminder + content}
    blocks = _blocks(content)
    cut = max((place + 1 for place, block in enumerate(blocks) if _is_tool_result(block)), default=0)
    return {**message, "content": [*blocks[:cut], {"type": "text", "text": reminder}, *blocks[cut:]]}


def _blocks(content: object) -> list[Any]:
    return content if isinstance(content, list) else [content]


def _is_tool_result(block: object) -> bool:
    return isinstance(block, Mapping) and block.get("type") == "tool_result"


def _tools_to_chat_tools(tools: object) -> list[Message] | None:
    """Tools as chat templates take them; those that the provider would run itself are left out."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(
        isinstance(tool, Mapping) and isinstance(tool.get("name"), str) for tool in tools
    ):
        raise bad_request("tools must be a list of objects with a name")
    kept = [tool for tool in tools if "input_schema" in tool or tool.get("type") in (None, "custom")]
    if len(kept) < len(tools):
        left_out = ", ".join(tool["name"] for tool in tools if tool not in kept)
        told.tell("tools that the provider would run itself are left out: %s", left_out)
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema") or _EMPTY_SCHEMA,
            },
        }
        for tool in kept
    ]


def _block_events(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A content block as it begins, and the changes that complete it."""
    if block["type"] == "thinking":
        thinking = {"type": "thinking_delta", "thinking": block["thinking"]}
        return {**block, "thinking": ""}, [thinking, {"type": "signature_delta", "signature": block["signature"]}]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]


async def list_models(request: web.Request) -> web.Response:
    model = {"type": "model", "id": MODEL_LABEL, "display_name": MODEL_LABEL, "created_at": "1970-01-01T00:00:00Z"}
    return web.json_response({"data": [model], "has_more": False, "first_id": MODEL_LABEL, "last_id": MODEL_LABEL})
