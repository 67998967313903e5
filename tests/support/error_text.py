"""Expected texts in messages: the place of a function, and the notes of an error."""

from __future__ import annotations

from typing import Any


def line_of(function: Any) -> int:
    """The line on which the definition of ``function`` begins."""
    return int(function.__code__.co_firstlineno)


def notes_of(caught: Any) -> str:
    """The notes of the error that ``pytest.raises`` caught."""
    return "\n".join(getattr(caught.value, "__notes__", ()))
