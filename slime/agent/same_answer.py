"""Comparison of a message that an agent sends back, or a template writes, with an answer that it was given.

Few clients send an answer back as they got it. They leave out the reasoning, or the text beside calls, trim white
space, split the content into parts, write the JSON of arguments otherwise, add nulls to it, rename calls, and send
what their tools made of the arguments. That is still the answer. Another text, other tools or other reasoning are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
"""As chat templates take it: ``content``, and for answers ``reasoning_content`` and ``tool_calls``."""


class ToolCall(dict[str, Any]):
    """A tool call with the id that the client knows it by, which templates do not see."""

    id: str = ""

    @classmethod
    def named(cls, call: Mapping[str, Any], call_id: object) -> ToolCall:
        """``call`` with an id."""
        found = cls(call)
        found.id = call_id if isinstance(call_id, str) else ""
        return found


def is_form_of(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Return True if the assistant message ``theirs`` is ``own``, or a lossy form of it."""
    calls, own_calls = _calls(theirs), _calls(own)
    if len(calls) != len(own_calls) or not all(map(_is_same_call, calls, own_calls)):
        return False
    thought, own_thought = (_squeezed(message.get("reasoning_content")) for message in (theirs, own))
    text, own_text = (_squeezed(message.get("content")) for message in (theirs, own))
    if own_thought and text == f"<think>{own_thought}</think>{own_text}":
        return True
    return thought in ("", own_thought) and (text == own_text or (not text and bool(calls)))


def likeness(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> int:
    """Return how like ``own`` the message ``theirs`` is: 0 if it is no form of it, more if ids are equal, less is left
    out."""
    if not is_form_of(theirs, own):
        return 0
    ids = _ids(theirs)
    same_ids = any(ids) and ids == _ids(own)
    kept = sum(bool(theirs.get(key)) == bool(own.get(key)) for key in ("content", "reasoning_content"))
    return 1 + 4 * same_ids + kept + (theirs == own)


def joined(messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Assistant messages as one: clients may send text and calls of an answer apart."""
    if len(messages) == 1:
        return messages[0]
    parts = {key: [str(m[key]) for m in messages if m.get(key)] for key in ("content", "reasoning_content")}
    return {
        "role": "assistant",
        **{key: "\n".join(texts) for key, texts in parts.items()},
        "tool_calls": [call for message in messages for call in _calls(message)],
    }


def says(text: str, message: Mapping[str, Any]) -> bool:
    """Return True if ``text``, a template's version of an answer, has its reasoning, text and calls."""
    squeezed = _squeezed(text)
    parts: Iterable[Any] = [message.get("reasoning_content"), message.get("content")]
    names = [call["function"]["name"] for call in _calls(message)]
    return all(_squeezed(part) in squeezed for part in [*parts, *names])


def _calls(message: Mapping[str, Any]) -> list[Any]:
    return message.get("tool_calls") or []


def _ids(message: Mapping[str, Any]) -> list[str]:
    return [call.id if isinstance(call, ToolCall) else "" for call in _calls(message)]


def _is_same_call(call: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Equal ids mean that a call is the same, even if a tool has changed its arguments."""
    if call["function"]["name"] != own["function"]["name"]:
        return False
    same_id = isinstance(call, ToolCall) and isinstance(own, ToolCall) and call.id != "" and call.id == own.id
    return same_id or _plain(call["function"]["arguments"]) == _plain(own["function"]["arguments"])


def _plain(value: object) -> Any:
    """``value`` without nulls in objects, and without white space in texts; true is not 1."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items() if one is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return _squeezed(value) if isinstance(value, str) else (isinstance(value, bool), value)


def _squeezed(text: object) -> str:
    return "".join(str(text).split()) if text else ""
