"""Requests that an agent's program makes beside its work: titles, topics, probes. They are served like all others."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from slime.agent.adapters.provider import Message

_TITLES = re.compile(
    r"new conversation topic|title generator|under 50 characters|"
    r"(write|generate|extract|create) a [^.\n]{0,40}\btitle\b",
    re.IGNORECASE,
)
"""Text in the system prompts of command-line agents that ask for the title or the topic of a session."""


def turn_meta(
    path: str, body: Mapping[str, Any], tools: list[Message] | None, max_tokens_keys: Iterable[str]
) -> dict[str, Any]:
    """Return what is kept of a turn's request: ``path``, ``model``, ``max_tokens``, ``has_tools`` and ``time``."""
    return {
        "path": path,
        "model": str(body.get("model") or ""),
        "max_tokens": next((body[key] for key in max_tokens_keys if body.get(key) is not None), None),
        "has_tools": bool(tools),
        "time": time.time(),
    }


def is_agent_turn(turn_meta: Mapping[str, Any]) -> bool:
    """A ``turn_filter``: False for probes (one token), and, of requests without tools, for those of a small fast model
    and those whose system prompt asks for a title or a topic."""
    if turn_meta["max_tokens"] == 1:
        return False
    if turn_meta["has_tools"]:
        return True
    prompts = [message["content"] for message in turn_meta["messages"] if message["role"] == "system"]
    return "haiku" not in turn_meta["model"].lower() and not any(map(_TITLES.search, prompts))
