"""The HTTP requests of agents: their bodies, what is refused, and whether the client still waits for the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any

from aiohttp import web

from slime.agent.adapters.in_flight import Turn
from slime.agent.trajectory import TurnRecord

CLIENT_POLL_S = 0.5


class Refusal(Exception):
    """A request that is refused: the HTTP ``status``, the provider's ``kind`` of error, and why."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message


class ClientGone(Exception):
    """The client has closed its connection."""


def bad_request(message: str) -> Refusal:
    return Refusal(400, "invalid_request_error", message)


def session_closed() -> Refusal:
    return Refusal(503, "overloaded_error", "session closed")


async def generate_for(
    generation: Coroutine[Any, Any, TurnRecord], in_flight: Turn, request: web.Request
) -> TurnRecord:
    """Await ``generation`` unless its session is closed or its client disconnects before."""
    if in_flight.is_cut_off:
        generation.close()
        raise session_closed()
    task = in_flight.generation = asyncio.ensure_future(generation)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=CLIENT_POLL_S)
            if not task.done() and is_gone(request):
                raise ClientGone
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if task.cancelled():
        raise session_closed()
    return task.result()


def is_gone(request: web.Request) -> bool:
    """Whether the client has closed its connection."""
    return request.transport is None or request.transport.is_closing()


async def json_object(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except ValueError as e:
        raise bad_request(f"the body is not JSON: {e}") from e
    if not isinstance(body, dict):
        raise bad_request(f"the body must be a JSON object, not {type(body).__name__}")
    return body


async def say_ok(request: web.Request) -> web.Response:
    return web.json_response({"ok": True})


def messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The request's messages, each an object with a role."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages must be a list with at least one message")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad_request(f"messages[{place}] must be an object with a role")
    return messages
