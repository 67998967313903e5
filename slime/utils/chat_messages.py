"""Chat messages of prompt files, in the forms that people publish, as chat templates take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Message = dict[str, Any]
MEDIA = ("image", "video", "audio", "file", "document")
_TEXT_PARTS = ("text", "input_text", "output_text")
_IN_PLACE_OF_CONTENT = ("tool_calls", "function_call", "reasoning_content")


class MediaError(ValueError):
    """Media in messages that are to be text."""


def check_messages(prompt: list[Any], where: str) -> None:
    """Raise ValueError for a message that templates cannot take, or would leave out without a word."""
    for number, message in enumerate(prompt):
        if isinstance(message, Mapping) and "role" in message and isinstance(message.get("content"), str):
            continue
        if not isinstance(message, Mapping) or "role" not in message or not _has_content(message):
            raise ValueError(f"{where}: message {number} must have a role and a content, got {message!r:.80}")
        content = message.get("content")
        if not isinstance(content, list | None) and message["role"] != "tool":
            raise ValueError(
                f"{where}: the content of message {number} must be text or a list of parts, got {content!r:.80}"
            )


def _has_content(message: Mapping[str, Any]) -> bool:
    """An assistant may call tools, or reason, and say nothing."""
    calls = message["role"] == "assistant" and any(message.get(key) for key in _IN_PLACE_OF_CONTENT)
    return message.get("content") is not None or calls


def text_messages(messages: list[Any], where: str) -> list[Message]:
    """Return messages whose lists of text parts are one text: templates for text alone leave lists out.

    Raises MediaError for a part that is no text.
    """

    def refuse(kind: str, part: Mapping[str, Any]) -> None:
        raise MediaError(
            f"{where} holds a part of type {part.get('type') or kind!r}, and prompts with media are not available: the "
            f"model would see a placeholder and no {kind}; leave such rows out"
        )

    return [_with_parts(message, refuse) for message in messages]


def media_messages(messages: list[Any], where: str, more: Mapping[str, Iterator[Any]] | None = None) -> list[Message]:
    """Return messages whose media parts are ``{"type": kind, kind: item}``, as ``process_vision_info`` takes them.

    ``more``: kind -> items of a column, for parts that hold none themselves. Raises ValueError for a part without an
    item.
    """

    def unified(kind: str, part: Mapping[str, Any]) -> dict[str, Any]:
        item = item_of(kind, part)
        if item is None:
            item = next((more or {}).get(kind, iter(())), None)
        if item is None or kind not in ("image", "video"):
            why = "holds nothing that can be read" if item is None else "is of a kind that is not available"
            raise ValueError(f"{where}: a part of type {part.get('type') or kind!r} {why}: {part!r:.80}")
        options = {key: part[key] for key in part if key not in _places_of(kind)}
        return {**options, "type": kind, kind: item}

    return [_with_parts(message, unified) for message in messages]


def _with_parts(message: Mapping[str, Any], media: Callable[[str, Mapping[str, Any]], Any]) -> Message:
    content = message.get("content")
    if not isinstance(content, list) or not all(isinstance(part, str | Mapping) for part in content):
        return dict(message)
    parts: list[Any] = []
    for part in content:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        part = {key: value for key, value in part.items() if value is not None}
        kind = media_kind(part)
        if kind is None and part.get("type", "text") in _TEXT_PARTS and isinstance(part.get("text"), str):
            part["type"] = "text"
        parts.append(part if kind is None else media(kind, part))
    if all(part.get("type") == "text" for part in parts):
        return {**message, "content": "".join(part["text"] for part in parts)}
    return {**message, "content": parts}


def media_kind(part: Mapping[str, Any]) -> str | None:
    """Return which of ``MEDIA`` a part of a message is, by its type or what it holds; None for another one."""
    named = str(part.get("type") or "")
    for kind in MEDIA:
        if kind in named or any(part.get(key) is not None for key in (kind, f"{kind}_url", f"input_{kind}")):
            return kind
    return None


def has_media(message: object) -> bool:
    """Return True for a message with a part that is media."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, list) else ()
    return any(isinstance(part, Mapping) and media_kind(part) is not None for part in parts)


def _places_of(kind: str) -> tuple[str, ...]:
    return (kind, f"{kind}_url", f"input_{kind}", "source", "url", "path", "base64", "data")


def item_of(kind: str, part: Mapping[str, Any]) -> Any:
    """Return the item of a media part: a path, an address, bytes, or an object."""
    for key in _places_of(kind):
        value = part.get(key)
        if value is None:
            continue
        if key in ("base64", "data") and isinstance(value, str) and not value.startswith("data:"):
            return f"data:{part.get('media_type') or part.get('format') or f'{kind}/*'};base64,{value}"
        if isinstance(value, Mapping) and not {"bytes", "array"} & set(value):  # those are Hugging Face's own objects
            return item_of(kind, value)
        return value
    return None
