"""Errors of HTTP requests, and which of them are retryable."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import aiohttp

RETRIED_STATUSES = frozenset({429, 502, 503, 504})
"""Replies that say "later" or "elsewhere". Every other status from 400 up is final."""

_BODY_SHOWN = 2000


class HttpRequestError(RuntimeError):
    """A request that failed for good: ``method``, ``url``, ``status`` (None without a reply), ``body``, ``attempts``,
    ``elapsed`` seconds."""

    def __init__(
        self, method: str, url: str, reason: str, *, status: int | None, body: str, attempts: int, elapsed: float
    ) -> None:
        self.method, self.url, self.status, self.body = method, url, status, body
        self.attempts, self.elapsed = attempts, elapsed
        shown = body if len(body) <= _BODY_SHOWN else body[:_BODY_SHOWN] + f"... ({len(body)} characters)"
        super().__init__(
            f"{method} {url} {reason} (status {status}, {attempts} attempt{'s' if attempts != 1 else ''}, "
            f"{elapsed:.1f} s){': ' + shown if shown else ''}"
        )


class HttpTimeoutError(HttpRequestError, TimeoutError):
    """A request that was not answered before its deadline."""


class StreamLostError(HttpRequestError):
    """A streamed answer that broke off before its end."""


class Retry(Exception):
    """One attempt failed with a retryable error."""

    def __init__(self, reason: str, status: int | None = None, body: str = "", retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.status, self.body, self.retry_after = reason, status, body, retry_after


@contextlib.contextmanager
def transport_errors(method: str, url: str, attempts: int) -> Iterator[None]:
    """Say which errors of a connection are final and which are retryable."""
    try:
        yield
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as e:
        raise HttpRequestError(
            method, url, "is not a valid HTTP URL", status=None, body=str(e), attempts=attempts, elapsed=0.0
        ) from e
    except (aiohttp.ClientError, OSError) as e:
        if isinstance(e, TimeoutError) and not isinstance(e, aiohttp.ClientError):
            raise
        raise Retry(f"{type(e).__name__}: {e}" if str(e) else type(e).__name__) from e


def check_status(reply: aiohttp.ClientResponse, raw: bytes, attempts: int, started: float) -> None:
    """Raise for every status from 400 up."""
    if reply.status < 400:
        return
    text = raw.decode("utf-8", "replace")
    if reply.status in RETRIED_STATUSES or is_lost_upstream(reply.status, text):
        retry_after = reply.headers.get("Retry-After", "")
        raise Retry(
            f"answered {reply.status}", reply.status, text, float(retry_after) if retry_after.isdigit() else 0.0
        )
    raise HttpRequestError(
        reply.method, str(reply.url), "was refused", status=reply.status, body=text, attempts=attempts,
        elapsed=time.monotonic() - started,
    )  # fmt: skip


def has_no_engine(failure: Retry) -> bool:
    """True when a router has no engine to send to: engines may be on their way back, so only the deadline ends this.

    The code is sglang-router's. A run that gets no engine back is ended by what watches the engines.
    """
    return failure.status == 503 and "no_available_workers" in failure.body


def is_lost_upstream(status: int, text: str) -> bool:
    """True when a router's 500 says that its connection to the engine broke: the engine died, others may serve.

    The codes are sglang-router's (``call_upstream_request_error``, ``read_response_body_failed``, ...).
    """
    return status == 500 and ("call_upstream_" in text or "read_response_" in text)
