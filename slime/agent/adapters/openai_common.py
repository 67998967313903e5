"""The common part of OpenAI's two APIs."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from slime.agent.adapters.http_requests import CONTEXT_EXCEEDED
from slime.agent.adapters.provider import MODEL_LABEL


def openai_error(kind: str, message: str) -> dict[str, Any]:
    """An error as both of OpenAI's APIs have it."""
    code = None
    if kind == CONTEXT_EXCEEDED:
        kind, code = "invalid_request_error", CONTEXT_EXCEEDED
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def arguments_object(arguments: dict[str, Any] | str | None) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, TypeError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"_raw_arguments": arguments}


def arguments_text(arguments: dict[str, Any]) -> str:
    """Return a text that ``arguments_object`` makes the same object of again."""
    raw = arguments.get("_raw_arguments")
    return raw if isinstance(raw, str) and len(arguments) == 1 else json.dumps(arguments)


async def list_models(request: web.Request) -> web.Response:
    model = {"id": MODEL_LABEL, "object": "model", "created": 0, "owned_by": "slime"}
    return web.json_response({"object": "list", "data": [model]})
