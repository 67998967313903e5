"""ChatML's turn markers inside of messages, distinguished from those that the chat template writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
_PRIVATE_USE = range(0xE000, 0xF900)


def without_markers(value: object) -> tuple[Any, dict[str, str]]:
    """Return ``value`` with a character in place of each marker in its texts, and which marker each one replaces.

    Rendered so, every marker in a conversation is the template's own.
    """
    texts = list(_texts(value))
    markers = [marker for marker in (TURN_START, TURN_END) if any(marker in text for text in texts)]
    if not markers:
        return value, {}
    used = set().union(*texts)
    free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
    written = {next(free): marker for marker in markers}

    def replaced(text: str) -> str:
        for character, marker in written.items():
            text = text.replace(marker, character)
        return text

    return _mapped(value, replaced), written


def with_markers(written: Mapping[str, str], text: str) -> str:
    """Return ``text`` with the markers that its characters replace."""
    for character, marker in written.items():
        text = text.replace(character, marker)
    return text


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _texts(pair)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _mapped(value: object, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    return type(value)(_mapped(item, change) for item in value) if isinstance(value, (list, tuple)) else value
