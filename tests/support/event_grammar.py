"""Reads streams of server-sent events as strictly as a client could, one automaton per protocol."""

from __future__ import annotations

import json
from typing import Any

Event = tuple[str, dict[str, Any]]


def events_of(raw: str) -> tuple[list[Event], int]:
    """The events with their names (empty without one), and how many comments, pings and repetitions that a response is
    in progress were between them; those are events too."""
    assert raw.endswith("\n\n")
    events: list[Event] = []
    idle = 0
    for block in raw.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if not lines or lines.get("event") == "ping":
            idle += 1
            continue
        assert set(lines) <= {"event", "data"}
        data = {} if lines["data"] == "[DONE]" else json.loads(lines["data"])
        name = "[DONE]" if lines["data"] == "[DONE]" else lines.get("event", "")
        assert "event" not in lines or data["type"] == name
        idle += name == "response.in_progress" and any(before == name for before, _ in events)
        events.append((name, data))
    return events, idle


def read_messages(events: list[Event]) -> dict[str, Any]:
    """A stream of Anthropic's Messages API; returns the message, or the ``error``."""
    name, first = events[0]
    assert name == "message_start"
    message = first["message"]
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    open_at: int | None = None
    for place, (name, data) in enumerate(events[1:], start=1):
        if name == "error":
            assert place == len(events) - 1
            return {"error": data["error"]}
        if name == "content_block_start":
            assert open_at is None
            assert data["index"] == len(message["content"])
            open_at, text = data["index"], ""
            message["content"].append(data["content_block"])
        elif name == "content_block_delta":
            assert open_at == data["index"]
            delta, block = data["delta"], message["content"][-1]
            if delta["type"] == "input_json_delta":
                text += delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] = block.get(key, "") + delta[key]
        elif name == "content_block_stop":
            assert open_at == data["index"]
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = json.loads(text)
            open_at = None
        elif name == "message_delta":
            assert open_at is None
            assert events[place + 1 :] == [("message_stop", {"type": "message_stop"})]
            message |= data["delta"]
            message["usage"] |= data["usage"]
            return message
        else:
            raise AssertionError(f"{name} at {place}")
    raise AssertionError("the stream has no end")


def read_chat(events: list[Event]) -> dict[str, Any]:
    """A stream of chat completions; returns the message with ``finish_reason``, or the ``error``."""
    head = None
    message: dict[str, Any] = {"content": ""}
    for place, (name, data) in enumerate(events):
        assert name in ("", "[DONE]")
        if "error" in data:
            assert place == len(events) - 1
            return data
        if name == "[DONE]":
            assert place == len(events) - 1
            assert "finish_reason" in message
            return message
        assert "finish_reason" not in message
        assert data["object"] == "chat.completion.chunk"
        assert head in (None, [data[key] for key in ("id", "created", "model")])
        head = [data[key] for key in ("id", "created", "model")]
        [choice] = data["choices"]
        delta = choice["delta"]
        assert ("role" in delta) == (place == 0)
        message["content"] += delta.get("content") or ""
        if "reasoning_content" in delta:
            message["reasoning_content"] = delta["reasoning_content"]
        for call in delta.get("tool_calls", []):
            assert call["index"] == len(message.setdefault("tool_calls", []))
            message["tool_calls"].append(call)
        if choice["finish_reason"]:
            message |= {"finish_reason": choice["finish_reason"], "usage": data["usage"]}
    raise AssertionError("the stream has no end")


def read_responses(events: list[Event]) -> dict[str, Any]:
    """A stream of the Responses API; returns the response, of which all items were streamed."""
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert [name for name, _ in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0][1]["response"] == events[1][1]["response"]
    assert events[0][1]["response"]["status"] == "in_progress"
    done: list[dict[str, Any]] = []
    item: dict[str, Any] | None = None
    part: dict[str, Any] | None = None
    text: str | None = None
    for place, (name, data) in enumerate(events[2:], start=2):
        kind = name.removeprefix("response.")
        if kind == "in_progress":
            assert data["response"] == events[0][1]["response"]
            continue
        if kind in ("completed", "failed"):
            assert place == len(events) - 1
            assert item is None
            assert data["response"]["id"] == events[0][1]["response"]["id"]
            assert kind == "failed" or data["response"]["output"] == done
            return data["response"]
        assert data["output_index"] == len(done)
        if kind == "output_item.added":
            assert item is None
            item = data["item"]
            continue
        assert item is not None
        if kind == "output_item.done":
            assert part is None
            assert data["item"]["id"] == item["id"]
            said = [p["text"] for p in item["content"]] if "content" in item else [text]
            whole = data["item"]
            streamed = [p["text"] for p in whole["content"]] if "content" in item else [_argument(whole)]
            assert said == streamed
            done.append(whole)
            item, text = None, None
            continue
        assert data["item_id"] == item["id"]
        if kind == "content_part.added":
            assert part is None
            assert (data["content_index"], data["part"]["text"]) == (len(item["content"]), "")
            part = data["part"]
        elif kind == "content_part.done":
            assert data["part"] == part
            item["content"].append(part)
            part = None
        elif kind.endswith(".delta"):
            if part is None:
                text = (text or "") + data["delta"]
            else:
                part["text"] += data["delta"]
        else:
            assert kind.endswith(".done")
            assert (text if part is None else part["text"]) == (data["text"] if part else _argument(data))
    raise AssertionError("the stream has no end")


def _argument(data: dict[str, Any]) -> Any:
    return data["arguments"] if "arguments" in data else data["input"]
