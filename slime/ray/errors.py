"""Failures of remote processes, told so that the cause comes first and Ray's machinery does not come at all."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

F = TypeVar("F", bound=Callable[..., Any])
LAST_LINES = 20

PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "timed out waiting",
)
"""Signs that a rank failed because another one had: gloo's and NCCL's words for a vanished peer."""


class RemoteFailure(RuntimeError):
    """An exception inside one of the run's actors: its type and message, and its traceback as text (``details``)."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message, details)
        self.message = message
        self.details = details

    def __str__(self) -> str:
        return self.message


class EngineDied(RuntimeError):
    """An engine or router process ended while the run needed it. The message holds its last log lines."""


class EnginesNeedWeights(EngineDied):
    """Every engine was lost, and those that were started again wait for the trainer's weights."""


def reports_errors(method: F) -> F:
    """Decorate an actor method: whatever it raises reaches the caller as a ``RemoteFailure``.

    Exceptions of other packages may not survive pickling, and Ray's rendering of them buries the message.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except (RemoteFailure, EngineDied):
            raise
        except Exception as e:  # noqa: BLE001  (re-raised in a form that travels)
            raise RemoteFailure(one_line_kind(e), clean_traceback(e)) from None

    return call  # type: ignore[return-value]


def one_line_kind(error: BaseException) -> str:
    """Return ``Type: message`` of the exception that started it all, and the notes that say where it comes from."""
    root = error
    if isinstance(root, RayTaskError) and root.cause is not None:
        root = root.cause
    text = str(root)
    if isinstance(root, (RemoteFailure, EngineDied)):
        return text
    notes = "".join(f"\n  {note}" for note in getattr(root, "__notes__", ()))
    return (f"{type(root).__name__}: {text}" if text else type(root).__name__) + notes


def clean_traceback(error: BaseException) -> str:
    """Return the traceback of ``error`` and its causes without the frames of Ray and of this module."""
    kept: list[str] = []
    for chunk in traceback.format_exception(error):
        if "/site-packages/ray/" in chunk.split("\n", 1)[0] or f'"{__file__}"' in chunk.split("\n", 1)[0]:
            continue
        kept.append(chunk)
    return "".join(kept).rstrip()


def describe(error: BaseException, name: str, what: str, log: Path | None) -> RemoteFailure:
    """Return what happened to the actor ``name`` during ``what``: the original message first, then where."""
    if isinstance(error, RayActorError):
        message = f"{name} ended unexpectedly during {what}: {_first_sentence(str(error))}"
        return RemoteFailure(message + last_lines(log), "")
    if isinstance(error, GetTimeoutError):
        return RemoteFailure(f"{name} did not answer during {what}: {error}")
    cause = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
    details = cause.details if isinstance(cause, RemoteFailure) else clean_traceback(cause)
    where = "" if name in str(cause) else f"\n  in {name}, during {what}"
    return RemoteFailure(f"{one_line_kind(cause)}{where}" + (f"\n  log: {log}" if log else ""), details)


def is_secondary(error: BaseException) -> bool:
    """True when ``error`` looks like the consequence of another rank's end rather than a cause."""
    text = str(error).lower()
    return any(sign in text for sign in PEER_LOST)


def last_lines(log: Path | None, n: int = LAST_LINES) -> str:
    """Return the end of a log file of this host as text to append to a message, empty when there is none."""
    if log is None or not log.is_file():
        return ""
    with open(log, "rb") as f:
        f.seek(max(0, f.seek(0, 2) - 16384))
        lines = f.read().decode(errors="replace").splitlines()[-n:]
    return f"\nThe last lines of {log}:\n" + "\n".join(f"  | {line}" for line in lines)


def _first_sentence(text: str) -> str:
    """Ray's actor errors are paragraphs; the line with the reason is enough."""
    text = text.partition("Worker exit detail:")[2] or text
    lines = [line.strip() for line in text.partition("Some common causes")[0].splitlines() if line.strip()]
    return lines[0] if lines else "no reason given"
