"""Comparison of a message that an agent sends back, or a template writes, with an answer that it was given.

Few clients send an answer back as they got it. They leave out the reasoning, or the text beside calls, trim white
space, split the content into parts, write the JSON of arguments otherwise, add nulls to it, rename calls, and send
what their tools made of the arguments. That is still the answer. Another text, other tools or other reasoning are not.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.agent.trajectory import MessageNode

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


# Prompts that keep the model's own tokens where the chat template writes its answers otherwise: the JSON of calls with
# other spaces than the model did, trimmed text. The prompt that continues from an answer is then the tokens that the
# engine saw and made, followed by what the template writes after that answer.

RENDERING = "rendering"
"""The entry of an answer's metadata that has the ``Rendering`` of its prompt."""


@dataclass(frozen=True)
class Rendering:
    """A prompt as the template wrote it: how many ids it has up to its last special one, which is ``begin``, their
    digest, and the ids after them, which begin the answer."""

    fixed: int
    digest: bytes
    begin: int
    opening: array[int]

    @classmethod
    def of(cls, ids: Sequence[int], special: Collection[int]) -> Rendering | None:
        """None for a template that writes no special token."""
        fixed = next((place for place in range(len(ids), 0, -1) if ids[place - 1] in special), 0)
        if not fixed:
            return None
        return cls(fixed, _digest(array("i", ids[:fixed])), ids[fixed - 1], array("i", ids[fixed:]))

    def begins(self, ids: array[int]) -> bool:
        """Return True if the template has written a longer conversation with the same beginning."""
        return len(ids) > self.fixed and _digest(ids[: self.fixed]) == self.digest

    def answer_start(self, ids: Sequence[int]) -> int:
        """Return where an answer begins in ``ids``; its first characters may have changed the last tokens here."""
        after = zip(self.opening, ids[self.fixed : self.fixed + len(self.opening)], strict=False)
        return self.fixed + next((i for i, (a, b) in enumerate(after) if a != b), len(self.opening))


def with_own_tokens(
    ids: Sequence[int],
    answers: Sequence[MessageNode],
    special: Collection[int],
    eos: int | None,
    decode: Callable[[Sequence[int]], str],
) -> list[int]:
    """The prompt ``ids`` of the template with the tokens of the latest of ``answers`` that it has left what it said."""
    held = array("i", ids)
    for answer in reversed(answers):
        turn, rendering = answer.turn, answer.metadata.get(RENDERING)
        if turn is None or rendering is None or not rendering.begins(held):
            continue
        ended = len(turn.output_ids) > 0 and turn.output_ids[-1] in special
        end = turn.output_ids[-1] if ended else eos
        if end is None or end not in held[rendering.fixed :]:
            continue  # the template ends answers otherwise
        place = held.index(end, rendering.fixed)
        if rendering.begin in held[rendering.fixed : place] and rendering.begin != end:
            continue  # that is the end of another message
        if says(decode(held[rendering.answer_start(held) : place]), answer.message):
            return [*turn.prompt_ids, *turn.output_ids, *held[place + ended :]]
    return list(ids)


def _digest(ids: array[int]) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
