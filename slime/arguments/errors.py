"""The one exception of this package."""

from __future__ import annotations

import re


class ArgumentError(ValueError):
    """A command line that cannot run: the message names the flags, what was seen and the way out.

    ``parse_args`` prints it and exits with status 2 when it reads ``sys.argv``; callers that pass their own list of
    words, and functions used outside a command line, get the exception. What a message repeats of a long value is cut.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(_LONG_WORD.sub(_cut, _LONG_LINE.sub(_cut, message)))


_LONG_WORD = re.compile(r"\S{600,}")
_LONG_LINE = re.compile(r"[^\n]{6000,}")
_KEPT = 150


def _cut(found: re.Match[str]) -> str:
    text = found[0]
    return f"{text[:_KEPT]}...({len(text) - 2 * _KEPT} characters)...{text[-_KEPT:]}"
