"""Replies to HTTP requests: which errors are retryable, which answers are rejected, and server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

logger = logging.getLogger(__name__)

RETRIED_STATUSES = frozenset({429, 502, 503, 504})
"""Replies that say "later" or "elsewhere". Every other status from 400 up is final."""
STREAM_BUFFER = 1 << 20
"""Bytes of a stream that may wait for their reader."""
MOST_REJECTED = 6
"""So many answers to one request may be rejected."""
_COMPLETE = frozenset({"stop", "length"})
Report = Callable[[str, str | None, str], None]
REST_DEADLINE_S = 5.0
_END = "[DONE]"
_FIELDS_WITHOUT_DATA = ("event:", "id:", "retry:", ":")
_BODY_SHOWN = 2000
_LOST_UPSTREAM = (
    "call_upstream_",
    "read_response_",
    "Decode handshake failed",
    "Decode transfer failed",
    "Prefill bootstrap failed",
    "Prefill transfer failed",
)
_NO_WORKER = "No worker available for model 'unknown'"
"""Of smg before it has had an engine: requests to ``/generate`` name no model."""


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


class NoEngine(Retry):
    """A router has no engine to send to: engines may be on their way back, so only the deadline ends this.

    Routers answer 503 with a code; smg, as long as it knows no model, 404. A run that gets no engine back is ended by
    what watches the engines.
    """


class Rejected(Retry):
    """An answer that came whole and is not used: ``engine_url`` gave it, None when that is not known."""

    def __init__(self, reason: str, engine_url: str | None) -> None:
        super().__init__(reason)
        self.engine_url = engine_url


@dataclass(frozen=True)
class WholeReply:
    """A reply that has been read to its end; names of ``headers`` are in lower case."""

    method: str
    url: str
    status: int
    headers: Mapping[str, str]
    content_type: str
    body: bytes


def engine_of(worker_url: str) -> str:
    """Return the address of the engine that a router lists as ``worker_url``: one rank of it under --router-dp-aware
    (``http://host:port@rank``)."""
    base, _, rank = worker_url.rpartition("@")
    return base if rank.isdecimal() else worker_url


def answering_engine(reply: aiohttp.ClientResponse | WholeReply) -> str | None:
    """Return which engine gave an answer, as smg reports in a header; None of a router that does not."""
    named = reply.headers.get("x-smg-routed-worker-id")
    return engine_of(named) if named and named.startswith("http") else None


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


def check_status(reply: aiohttp.ClientResponse | WholeReply, raw: bytes, attempts: int, started: float) -> None:
    """Raise for every status from 400 up."""
    if reply.status < 400:
        return
    text = raw.decode("utf-8", "replace")
    has_no_engine = _NO_WORKER in text or (reply.status == 503 and "no_available_workers" in text)
    if reply.status in RETRIED_STATUSES or is_lost_upstream(reply.status, text) or has_no_engine:
        retry_after = reply.headers.get("retry-after", "")
        raise (NoEngine if has_no_engine else Retry)(
            f"answered {reply.status}", reply.status, text, float(retry_after) if retry_after.isdigit() else 0.0
        )
    raise HttpRequestError(
        reply.method, str(reply.url), "was refused", status=reply.status, body=text, attempts=attempts,
        elapsed=time.monotonic() - started,
    )  # fmt: skip


def is_lost_upstream(status: int, text: str) -> bool:
    """True when a 500 means that an engine was lost on the way: others may serve.

    The codes of a broken connection are sglang-router's (``call_upstream_request_error``,
    ``read_response_body_failed``, ...); the sentences are those of a prefill or decode engine whose partner died, or
    was paused for new weights.
    """
    return status == 500 and any(sign in text for sign in _LOST_UPSTREAM)


# Answers that come as server-sent events, of which each repeats the earlier ones


class LatestEvents:
    """Iterates over the JSON values of one answer: always the latest at hand, because it repeats the earlier ones.

    The end of the answer is its event ``[DONE]`` or an error; ``ended``: it was reached. Lines that are no
    JSON are skipped with a warning. Raises HttpRequestError for an event that reports an error, HttpTimeoutError when
    nothing comes for ``timeout`` s, and StreamLostError when the connection ends before the answer, or the error is of
    the kind that says "later".
    """

    def __init__(self, reply: aiohttp.ClientResponse, timeout: float) -> None:
        self.ended = False
        self._reply = reply
        self._timeout = timeout
        self._buffer = bytearray()
        self._began = time.monotonic()

    @property
    def engine_url(self) -> str | None:
        """The URL of the engine that answers; None where the router does not report it."""
        return answering_engine(self._reply)

    def __aiter__(self) -> LatestEvents:
        return self

    async def __anext__(self) -> Any:
        while True:
            latest = None if self.ended else self._latest(await self._read_lines())
            if latest is not None:
                if not isinstance(latest, dict) or "error" not in latest:
                    return latest
                self.ended, error = True, latest["error"]
                code = error.get("code") if isinstance(error, dict) else None
                kind = StreamLostError if code in RETRIED_STATUSES else HttpRequestError
                status = code if isinstance(code, int) else None
                raise self._failure(kind, "was refused", status, orjson.dumps(error).decode())
            if self.ended:
                try:  # to the end of the reply, so that the connection can be used again
                    while await self._read(REST_DEADLINE_S):
                        pass
                except HttpRequestError:  # the answer itself was complete
                    self._reply.close()
                raise StopAsyncIteration

    def close(self) -> None:
        """Give the connection back; one with an answer in progress is cut."""
        self._reply.release()

    async def _read_lines(self) -> list[str]:
        """Return the lines that are complete by now, at least one."""
        while True:
            data = await self._read()
            if not data:
                raise self._failure(StreamLostError, "ended before its answer did")
            self._buffer += data
            end = self._buffer.rfind(b"\n")
            if end >= 0:
                lines = self._buffer[:end].decode("utf-8", "replace").split("\n")
                del self._buffer[: end + 1]
                return lines

    async def _read(self, timeout: float | None = None) -> bytes:
        try:
            async with asyncio.timeout(timeout or self._timeout):
                return await self._reply.content.readany()
        except TimeoutError as e:
            raise self._failure(HttpTimeoutError, f"sent nothing for {self._timeout:g} s") from e
        except (aiohttp.ClientError, OSError) as e:
            raise self._failure(StreamLostError, f"broke off ({type(e).__name__}: {e})") from e

    def _latest(self, lines: list[str]) -> Any:
        """Return the value of the last line that has one, or None."""
        for line in reversed(lines):
            name, _, text = line.partition(":")
            text = text.strip()
            if name == "data" and text == _END:
                self.ended = True
            elif name == "data":
                try:
                    return orjson.loads(text)
                except orjson.JSONDecodeError as e:
                    logger.warning("%s sent an event that is no JSON (%s): %.200s", self._reply.url, e, text)
            elif line.strip() and not line.startswith(_FIELDS_WITHOUT_DATA):
                logger.warning("%s sent a line that is no event: %.200s", self._reply.url, line)
        return None

    def _failure(
        self, kind: type[HttpRequestError], reason: str, status: int | None = None, body: str = ""
    ) -> HttpRequestError:
        return kind(
            self._reply.method, str(self._reply.url), reason, status=status, body=body, attempts=1,
            elapsed=time.monotonic() - self._began,
        )  # fmt: skip


def wrong_with(answer: object, oldest_version: int | None = None) -> str | None:
    """Return what is wrong with the answer to a ``/generate`` request for log-probs, None when nothing is.

    Every token needs a finite log-prob, and the engine the weights of ``oldest_version`` at least. An answer without
    ``meta_info`` is not of an engine, and is left to its reader.
    """
    meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
    if not isinstance(meta, Mapping):
        return None
    reported = meta.get("output_token_logprobs") or []
    try:
        log_probs = [item[0] for item in reported]
    except (TypeError, LookupError):
        return "output_token_logprobs has an entry without a log-prob"
    among_kept = meta.get("output_token_sampling_logprobs") or []
    for name, values in (("log-prob", log_probs), ("log-prob among the kept tokens", among_kept)):
        if not _all_finite(values):
            index = next(i for i, value in enumerate(values) if not _all_finite([value]))
            return f"token {index} of {len(reported)} has the {name} {values[index]}"
    finish, made = meta.get("finish_reason"), meta.get("completion_tokens")
    kind = finish.get("type") if isinstance(finish, Mapping) else finish
    if kind in _COMPLETE and isinstance(made, int) and len(reported) < made:
        return f"{len(reported)} log-probs came with {made} tokens"
    version = meta.get("weight_version")
    if oldest_version is not None and version is not None and finish is not None:
        number = str(version)
        if not number.isdecimal() or int(number) < oldest_version:
            return f"it was generated with weight version {number}, and version {oldest_version} was asked"
    return None


def _all_finite(values: list[Any]) -> bool:
    try:
        return math.isfinite(sum(values))  # one bad value makes the sum bad
    except TypeError:
        return False


class EngineAnswers:
    """The answers that were rejected, and the weights that engines must have.

    Attributes:
        oldest_version: router URL -> the version that all of its engines have had since the last push.
        report: called with the router's URL, the engine's (None: the router does not name it) and what is wrong.
        rejected: engine URL -> its answers that were rejected.
    """

    def __init__(self) -> None:
        self.oldest_version: dict[str, int] = {}
        self.report: Report | None = None
        self.rejected: Counter[str] = Counter()
        self._lock = threading.Lock()

    def reject(self, router_url: str, engine_url: str | None, wrong: str) -> str:
        """Count an answer that is not used; return a sentence about it."""
        with self._lock:
            self.rejected[engine_url or router_url] += 1
        sentence = f"an answer of {engine_url or f'an engine behind {router_url}'} is rejected: {wrong}"
        if self.report is None:
            logger.warning("%s", sentence)
        else:
            self.report(router_url, engine_url, wrong)
        return sentence
