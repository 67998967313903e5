"""Errors with data: what the code decides by. The message is for people, and no code reads it.

The data goes with the error through every process of a run: an actor's exception, the ranks of a trainer (which gather
it), the reply of an engine, the driver. Exceptions of other packages say all in words; what those mean is read here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, TypedDict, cast
from urllib.parse import quote, unquote

PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "timed out waiting",
)
"""Words of torch, gloo, NCCL and the operating system for the other end of a connection that has vanished."""
_IN_TEXT = re.compile(r" ?\[slime-error-data:([\w.~%-]+)\]")


class ErrorData(TypedDict, total=False):
    """Data of an error for the code that handles it."""

    hanging: dict[str, str]
    """URL of each engine that did not answer in a push of weights -> what it could not do; other calls it may answer"""
    refused: bool
    """an engine has received changes of the weights and not taken them: it needs all weights"""
    needs_full_version: bool
    """the changes on the shared directory do not lead to the version that a host needs: it needs all weights"""
    peer_lost: bool
    """a connection has ended, so this is probably the consequence of another process's failure"""
    port_taken: bool
    """a server could not bind its port, which another process has"""


class StructuredError(RuntimeError):
    """An error with ``data``, which is kept when it is pickled."""

    def __init__(self, message: str, data: ErrorData | None = None) -> None:
        super().__init__(message)
        self.data: ErrorData = data.copy() if data else {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[StructuredError], args: tuple[Any, ...], state: dict[str, Any]) -> StructuredError:
    """Return an error as it was pickled; subclasses have constructors with other parameters."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def data_of(error: BaseException | None) -> ErrorData:
    """Return the data of ``error`` and its causes, and what the words of the first mean that is another package's."""
    found: list[ErrorData] = []
    words = None
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # an exception may be its own cause
        seen.add(id(error))
        if isinstance(error, StructuredError):
            found.append(error.data)
        elif words is None:
            words = str(error).lower()
            found.append({"peer_lost": True} if any(sign in words for sign in PEER_LOST) else {})
        error = error.__cause__
    return merged(found)


def merged(parts: Iterable[ErrorData]) -> ErrorData:
    """Return the data of several errors as that of one; dicts are merged, the first value of a key counts."""
    result: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            before = result.get(key)
            if isinstance(value, dict) and isinstance(before, dict):
                result[key] = {**value, **before}
            else:
                result[key] = before or value
    return cast(ErrorData, result)


def to_text(message: str, data: ErrorData) -> str:
    """Return ``message`` with the data behind it, for a protocol that carries one text; JSON needs no escapes in it."""
    return f"{message} [slime-error-data:{quote(json.dumps(data), safe='')}]"


def from_text(text: str) -> tuple[str, ErrorData]:
    """Return a text without the data that ``to_text`` has put anywhere into it, and that data."""
    return _IN_TEXT.sub("", text), merged(map(_parsed, _IN_TEXT.findall(text)))


def _parsed(text: str) -> ErrorData:
    try:
        found = json.loads(unquote(text))
    except ValueError:
        return {}
    return cast(ErrorData, found) if isinstance(found, dict) else {}
