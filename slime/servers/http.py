"""The blocking HTTP call under the engine and router clients, and what it raises."""

from __future__ import annotations

import threading

import requests

from slime.utils.structured_error import StructuredError, from_text

_BODY_SHOWN = 2000


class ServerError(StructuredError):
    """A control call that failed for good; ``data`` is what slime's engine plug-in has put into the reply.

    Attributes:
        method: HTTP method.
        url: full address called.
        status: HTTP status, None when there was no reply.
        body: text of the reply, or of the transport error.
    """

    server = "server"

    def __init__(self, method: str, url: str, *, status: int | None, body: str, hint: str = "") -> None:
        body, data = from_text(body)
        self.method, self.url, self.status, self.body = method, url, status, body
        shown = body if len(body) <= _BODY_SHOWN else f"{body[:_BODY_SHOWN]}... ({len(body)} characters)"
        outcome = "got no reply" if status is None else f"answered {status}"
        message = f"{method} {url}: the {self.server} {outcome}: {shown.strip()}{' ' + hint if hint else ''}"
        super().__init__(message, data)


class EngineError(ServerError):
    """A control call to an engine failed; see the engine's log under the run directory."""

    server = "engine"


class EngineTimeoutError(EngineError, TimeoutError):
    """An engine did not answer, or did not reach a state, before the deadline."""


class RouterError(ServerError):
    """A control call to a router failed."""

    server = "router"


class RouterTimeoutError(RouterError, TimeoutError):
    """A router did not answer, or did not list a worker as ready, before the deadline."""


class BlockingHttp:
    """Calls to one server. Thread-safe: each thread has its own connection.

    ``api_key`` is sent as a bearer token. Proxy settings of the environment are ignored. ``timeout`` (s) is what a call
    may take when it names none. ``error`` and ``timeout_error`` are the classes raised.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        timeout: float,
        error: type[ServerError],
        timeout_error: type[ServerError],
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._error, self._timeout_error = error, timeout_error
        self._local = threading.local()

    def get(self, path: str, *, timeout: float | None = None, hint: str = "") -> requests.Response:
        """GET ``path``; raises the error class for a status from 400 up."""
        return self._call("GET", path, None, timeout, hint)

    def post(
        self, path: str, body: object = None, *, timeout: float | None = None, hint: str = ""
    ) -> requests.Response:
        """POST ``body`` as JSON (``{}`` when None)."""
        return self._call("POST", path, {} if body is None else body, timeout, hint)

    def delete(self, path: str, *, timeout: float | None = None, hint: str = "") -> requests.Response:
        """DELETE ``path``."""
        return self._call("DELETE", path, None, timeout, hint)

    def _call(self, method: str, path: str, body: object, timeout: float | None, hint: str) -> requests.Response:
        url = f"{self.url}{path}"
        seconds = self.timeout if timeout is None else timeout
        try:
            reply = self._session().request(method, url, json=body, timeout=(min(seconds, 10.0), seconds))
        except requests.Timeout as e:
            raise self._timeout_error(method, url, status=None, body=f"none within {seconds:g} s", hint=hint) from e
        except requests.RequestException as e:
            raise self._error(method, url, status=None, body=f"{type(e).__name__}: {e}", hint=hint) from e
        if reply.status_code >= 400:
            raise self._error(method, url, status=reply.status_code, body=reply.text, hint=hint)
        return reply

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = requests.Session()
            session.trust_env = False
            session.headers.update(self._headers)
            self._local.session = session
        return session
