"""What a call to an engine or a router raises."""

from __future__ import annotations

_BODY_SHOWN = 2000


class ServerError(RuntimeError):
    """A control call that failed for good.

    Attributes:
        method: HTTP method.
        url: full address called.
        status: HTTP status, None when there was no reply.
        body: text of the reply, or of the transport error.
    """

    server = "server"

    def __init__(self, method: str, url: str, *, status: int | None, body: str, hint: str = "") -> None:
        self.method, self.url, self.status, self.body = method, url, status, body
        shown = body if len(body) <= _BODY_SHOWN else f"{body[:_BODY_SHOWN]}... ({len(body)} characters)"
        outcome = "got no reply" if status is None else f"answered {status}"
        super().__init__(f"{method} {url}: the {self.server} {outcome}: {shown.strip()}{' ' + hint if hint else ''}")


class EngineError(ServerError):
    """A control call to an engine failed; the see the engine's log under the run directory."""

    server = "engine"


class EngineTimeoutError(EngineError, TimeoutError):
    """An engine did not answer, or did not reach a state, before the deadline."""


class RouterError(ServerError):
    """A control call to a router failed."""

    server = "router"


class RouterTimeoutError(RouterError, TimeoutError):
    """A router did not answer, or did not list a worker as ready, before the deadline."""
