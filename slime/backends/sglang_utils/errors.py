"""Errors of starting a server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slime.utils.structured_error import StructuredError


class ServerStartError(StructuredError):
    """An engine or a router did not become ready: it exited, or its deadline passed. Carries its last log lines."""


class EngineStartError(ServerStartError):
    """An engine did not become ready."""


class RouterStartError(ServerStartError):
    """A router did not become ready."""


def with_last_lines(what: str, log_path: Path, lines: Sequence[str]) -> str:
    """Return ``what``, the log's path and its last lines as one message."""
    shown = "\n".join(f"  | {line}" for line in lines) or "  | (the log is empty)"
    return f"{what}\nLast lines of {log_path}:\n{shown}"
