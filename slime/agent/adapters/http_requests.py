"""The HTTP requests of agents: their bodies, what is refused, and whether the client still waits for the answer."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from aiohttp import web

from slime.agent.adapters.in_flight import Turn
from slime.servers.http_utils import HttpRequestError
from slime.servers.request_checks import RequestError, read_json
from slime.utils.bounded_log import BoundedLog

logger = logging.getLogger(__name__)
told = BoundedLog(logger)
T = TypeVar("T")

CLIENT_POLL_S = 0.5
CONTEXT_EXCEEDED = "context_length_exceeded"
"""A kind of ``Refusal`` that each provider has its own form for: agents compact their history on it."""
_TOO_LONG = (
    re.compile(r"input \((\d+) tokens\) is longer than the model's context length \((\d+) tokens\)"),
    re.compile(r"Input length \((\d+) tokens\) exceeds the maximum allowed length \((\d+) tokens\)"),
)
"""Messages with which SGLang refuses a prompt."""


class Refusal(Exception):
    """A request that is refused: the HTTP ``status``, the provider's ``kind`` of error, and why."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message


class ClientGone(Exception):
    """The client has closed its connection."""


def refuse(status: int, message: str) -> web.Response:
    """The answer to a request that is refused with any provider."""
    kind = "invalid_request_error" if status == 415 else "permission_error"
    return web.json_response({"type": "error", "error": {"type": kind, "message": message}}, status=status)


def bad_request(message: str) -> Refusal:
    return Refusal(400, "invalid_request_error", message)


def session_closed() -> Refusal:
    return Refusal(503, "overloaded_error", "session closed")


def refusal_of(error: Exception) -> Refusal:
    """Return the answer to a client for the error that ended its turn; the reason is logged."""
    if isinstance(error, Refusal):
        (told.tell if error.status in (400, 401) else logger.debug)("refused: %s", error.message)
        return error
    if isinstance(error, RecursionError):  # JSON in a text of the request
        return bad_request("something in the request is nested too deeply")
    if isinstance(error, HttpRequestError):
        told.tell("a turn failed on the engine: %s", error)
        if error.status is None or not 400 <= error.status < 500:
            # the whole message has addresses that do not concern the agent
            return Refusal(502, "api_error", "the engines failed; the log of the gateway has the reason")
        found = next(filter(None, (pattern.search(str(error.body)) for pattern in _TOO_LONG)), None)
        if found:
            return Refusal(400, CONTEXT_EXCEEDED, f"prompt is too long: {found[1]} tokens > {found[2]} maximum")
        return bad_request(f"the engine refused the request: {error.body}")
    logger.error("a turn failed", exc_info=error)
    return Refusal(500, "api_error", f"{type(error).__name__}: {error}")


async def generate_for(
    generation: Coroutine[Any, Any, T],
    in_flight: Turn,
    request: web.Request,
    keep_alive: Callable[[], Awaitable[None]] | None = None,
) -> T:
    """Await ``generation`` unless its session is closed or its client disconnects before; ``keep_alive`` is called all
    along."""
    if in_flight.is_cut_off:
        generation.close()
        raise session_closed()
    task = in_flight.generation = asyncio.ensure_future(generation)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=CLIENT_POLL_S)
            if task.done():
                break
            if is_gone(request):
                raise ClientGone
            if keep_alive is not None:
                await keep_alive()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if task.cancelled():
        raise session_closed()
    return task.result()


def is_gone(request: web.Request) -> bool:
    """Return True if the client has closed its connection."""
    return request.transport is None or request.transport.is_closing()


async def json_object(request: web.Request) -> dict[str, Any]:
    """The body, an object. Raises Refusal."""
    try:
        body = await read_json(request)
    except RequestError as e:
        raise Refusal(e.status, "invalid_request_error", e.message) from None
    if not isinstance(body, dict):
        raise bad_request(f"the body must be a JSON object, not {type(body).__name__}")
    return body


def messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The request's messages, each an object with a role."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages must be a list with at least one message")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad_request(f"messages[{place}] must be an object with a role")
    return messages
