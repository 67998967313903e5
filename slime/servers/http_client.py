"""The asynchronous HTTP client of the rollout side: pooled connections, deadlines, retries and real cancellation.

A request to ``/generate`` carries a request id. When it is cancelled or its deadline expires the id is aborted on the
engines: on those the router lists, because routers do not forward ``/abort_request``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import random
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import aiohttp
import orjson

from slime.servers.http_replies import (
    MOST_REJECTED,
    RETRIED_STATUSES,
    STREAM_BUFFER,
    EngineAnswers,
    HttpRequestError,
    HttpTimeoutError,
    LatestEvents,
    NoEngine,
    Rejected,
    Retry,
    StreamLostError,
    WholeReply,
    answering_engine,
    check_status,
    engine_of,
    is_lost_upstream,
    transport_errors,
    wrong_with,
)
from slime.utils import run_key

__all__ = [
    "RETRIED_STATUSES",
    "HttpClient",
    "HttpRequestError",
    "HttpTimeoutError",
    "StreamLostError",
    "is_lost_upstream",
]

logger = logging.getLogger(__name__)

BUSY_STATUSES = frozenset({429, 503})
"""Replies of an engine that has enough to do; they are expected now and then."""

BACKOFF_BASE_S, BACKOFF_CAP_S = 0.25, 10.0
ABORT_DEADLINE_S = 10.0
WORKER_LIST_AGE_S = 1.0
CONTROL_CONNECTIONS = 100
MOST_ADDRESSES = 1024
CONNECT_DEADLINE_S = 30
_LARGE_BODY = 1 << 14
_gc_lock = threading.Lock()
Fetch: TypeAlias = "Callable[[str, str, bytes | None, dict[str, str]], Awaitable[WholeReply]]"


class HttpClient:
    """Connection pool of at most ``concurrency`` connections to a server from an event loop, and a few for questions
    and aborts.

    ``request_timeout`` (s) is the deadline of a whole request, its retries included. ``api_key`` is sent as a bearer
    token to the hosts registered with ``trust`` and to no other. Proxy settings of the environment are ignored.
    ``refused`` counts the ``/generate`` requests that a busy server refused and that wait to be sent again. ``answers``
    has what engines must answer, and whom to tell of answers that were rejected.
    """

    def __init__(self, concurrency: int, request_timeout: float = 1800.0, api_key: str | None = None) -> None:
        self.concurrency = max(1, concurrency)
        self.request_timeout = request_timeout
        self.api_key = api_key
        self._trusted: set[str] = set()
        self._headers_of: dict[str, dict[str, str]] = {}
        self._headers_known: tuple[int, int] = (-1, -1)
        self._pools: dict[asyncio.AbstractEventLoop, _ConnectionPools] = {}
        self._workers: dict[str, tuple[float, dict[str, str]]] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._left_to_caller: set[str] = set()
        self.refused = 0
        self.answers = EngineAnswers()
        self.fetch: Fetch = self.fetch_here
        """Sends the requests whose answers do not come as events: from here, or from other nodes (``posters``)."""

    def trust(self, url: str) -> None:
        """Send the API key to the host and port of ``url`` from now on."""
        self._trusted.add(urlsplit(url).netloc)

    async def post(
        self,
        url: str,
        payload: Mapping[str, Any] | None,
        *,
        max_retries: int = 60,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """POST ``payload`` as JSON; return the reply parsed as JSON, or as text when it is not JSON.

        Transport errors and the statuses 429, 502, 503 and 504 are retried with jittered exponential back-off, at most
        ``max_retries`` attempts in all; where a router has no engine, until one is back. An engine's answer with
        log-probs that cannot be trained on (``wrong_with``) is rejected, and the request goes straight to another
        engine, until ``MOST_REJECTED`` were. Raises HttpRequestError for any other status from 400 up (at once, with
        the reply's text) and when attempts run out, HttpTimeoutError after ``timeout`` s (default ``request_timeout``).
        """
        payload = payload or {}
        base, _, endpoint = url.rpartition("/")
        rid = _AttemptId(payload) if endpoint == "generate" and _is_single_request(payload) else None
        checked = rid is not None and payload.get("return_logprob")
        send = functools.partial(self._attempt_checked, base) if checked else None
        try:
            return await self._request("POST", url, payload, max_retries, headers, timeout, rid, send)
        except (asyncio.CancelledError, HttpTimeoutError):
            self._abort_unless_left(base, rid)
            raise

    @contextlib.asynccontextmanager
    async def stream(
        self,
        url: str,
        payload: Mapping[str, Any],
        *,
        max_retries: int = 60,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[LatestEvents]:
        """POST ``payload`` with ``stream``; yield the server-sent events of the answer, of those at hand the latest.

        ``timeout`` s (default ``request_timeout``) is the deadline of the answer's head, retries included, and then of
        every event. An answer that is left before its end is aborted on the engines. Raises as ``post`` does, and
        StreamLostError when the connection breaks once events may have come.
        """
        base, _, endpoint = url.rpartition("/")
        payload = {**payload, "stream": True}
        rid = _AttemptId(payload) if endpoint == "generate" and _is_single_request(payload) else None
        try:
            reply = await self._request("POST", url, payload, max_retries, headers, timeout, rid, self._open)
        except (asyncio.CancelledError, HttpTimeoutError):
            self._abort_unless_left(base, rid)
            raise
        events = LatestEvents(reply, self.request_timeout if timeout is None else timeout)
        try:
            yield events
        finally:
            events.close()
            if not events.ended:
                self._abort_unless_left(base, rid)

    async def get(self, url: str, *, timeout: float = 60.0, headers: Mapping[str, str] | None = None) -> Any:
        """GET ``url`` once; return the reply parsed as JSON, or as text. Raises HttpRequestError as ``post`` does."""
        return await self._request("GET", url, None, 1, headers, timeout, None)

    async def list_workers(self, router_url: str, *worker_types: str) -> list[str]:
        """Return the engine URLs that the router at ``router_url`` lists (cached for a second): all, or of some types.

        An engine, which has no ``/workers``, is its own only worker.
        """
        cached = self._workers.get(router_url)
        if cached is None or time.monotonic() - cached[0] >= WORKER_LIST_AGE_S:
            try:
                reply = await self.get(f"{router_url}/workers", timeout=ABORT_DEADLINE_S)
                types = {engine_of(worker["url"]): worker.get("worker_type", "regular") for worker in reply["workers"]}
            except HttpRequestError as e:
                if e.status not in (404, 405):
                    raise
                types = {router_url: "regular"}
            if urlsplit(router_url).netloc in self._trusted:
                for url in types:
                    self.trust(url)
            cached = self._workers[router_url] = (time.monotonic(), types)
        return [url for url, kind in cached[1].items() if not worker_types or kind in worker_types]

    @contextlib.contextmanager
    def abort_left_to_caller(self, router_urls: Iterable[str]) -> Iterator[None]:
        """Within the block, requests to these routers that are cancelled are not aborted one by one: the caller is
        about to abort everything on their engines, with one request per engine."""
        added = set(router_urls) - self._left_to_caller
        self._left_to_caller |= added
        try:
            yield
        finally:
            self._left_to_caller -= added

    async def drain_aborts(self) -> None:
        """Wait until the aborts of requests that were cancelled on the running loop have been sent (each has a deadline
        of its own)."""
        loop = asyncio.get_running_loop()
        while own := {task for task in self._aborts.copy() if task.get_loop() is loop}:
            await asyncio.wait(own)

    async def close(self) -> None:
        """Send what aborts are left and close the running loop's connections."""
        await self.drain_aborts()
        pools = self._pools.pop(asyncio.get_running_loop(), None)
        if pools is not None:
            await pools.close()

    def turn(self) -> asyncio.Semaphore:
        """Return what to enter (``async with``) before a request whose deadline is not to begin in the queue: at most
        as many are in it as there are connections to a server."""
        return self._pools_of_loop().turns

    def _pools_of_loop(self) -> _ConnectionPools:
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            for ended in [other for other in list(self._pools) if other.is_closed()]:
                self._pools.pop(ended, None)
            self._pools[loop] = _ConnectionPools(self.concurrency)
        return self._pools[loop]

    async def _session(self, method: str, url: str) -> aiohttp.ClientSession:
        """Return the session for a request: short questions and aborts must not wait behind long answers."""
        return await self._pools_of_loop().session(short=method == "GET" or url.endswith("/abort_request"))

    def _headers(self, url: str, extra: Mapping[str, str] | None) -> dict[str, str]:
        known = run_key.version(), len(self._trusted)
        if known != self._headers_known or len(self._headers_of) > MOST_ADDRESSES:
            self._headers_known, self._headers_of = known, {}
        headers = self._headers_of.get(url)
        if headers is None:
            headers = self._headers_of[url] = {"Content-Type": "application/json", **self._authorization(url)}
        return {**headers, **extra} if extra else headers.copy()

    def _authorization(self, url: str) -> dict[str, str]:
        address = urlsplit(url)
        key = self.api_key if address.netloc in self._trusted else None
        key = key or run_key.key_for(address.scheme, address.hostname, address.port)
        if key and address.path == "/abort_request":
            key = run_key.control_key_for(address.hostname, address.port) or key
        return {"Authorization": f"Bearer {key}"} if key else {}

    async def _request(
        self,
        method: str,
        url: str,
        payload: Any,
        max_attempts: int,
        headers: Mapping[str, str] | None,
        timeout: float | None,
        rid: _AttemptId | None,
        send: Callable[..., Awaitable[Any]] | None = None,
    ) -> Any:
        send = send or self._attempt
        limit = self.request_timeout if timeout is None else timeout
        started = time.monotonic()
        last: Retry | None = None
        attempt = rejected = 0
        target = url
        try:
            async with asyncio.timeout(limit):
                while True:
                    attempt += 1
                    body = _encode(payload if rid is None else {**payload, "rid": rid.of_attempt(attempt)})
                    try:
                        return await send(method, target, body, self._headers(target, headers), attempt, started)
                    except Retry as e:
                        last, target = e, url
                    rejected += isinstance(last, Rejected)
                    if rejected >= MOST_REJECTED:
                        break
                    if attempt >= max(1, max_attempts) and not isinstance(last, NoEngine):
                        break
                    delay = min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2 ** min(attempt - 1, 10)) * random.uniform(0.5, 1.0)
                    busy = rid is not None and last.status in BUSY_STATUSES
                    (logger.warning if attempt in ((5, 20) if busy else (1, 5, 20)) else logger.debug)(
                        "%s %s: %s (attempt %d of %d), again in %.1f s", method, url, last.reason, attempt,
                        max_attempts, delay,
                    )  # fmt: skip
                    self.refused += busy
                    try:
                        await asyncio.sleep(max(delay, min(BACKOFF_CAP_S, last.retry_after)))
                    finally:
                        self.refused -= busy
                    if isinstance(last, Rejected):
                        target = await self._another_engine(url, last.engine_url)
        except TimeoutError as e:
            reason = f"was not answered within its deadline of {limit:g} s"
            if last is not None:
                reason += f"; the last failed attempt: {last.reason}"
            raise HttpTimeoutError(
                method, url, reason, status=last.status if last else None, body=last.body if last else "",
                attempts=attempt, elapsed=time.monotonic() - started,
            ) from e  # fmt: skip
        raise HttpRequestError(
            method, url, f"failed: {last.reason}", status=last.status, body=last.body, attempts=attempt,
            elapsed=time.monotonic() - started,
        )  # fmt: skip

    async def _attempt(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str], attempt: int, started: float
    ) -> Any:
        return (await self._exchange(method, url, body, headers, attempt, started))[0]

    async def _attempt_checked(
        self,
        router_url: str,
        method: str,
        url: str,
        body: bytes | None,
        headers: dict[str, str],
        attempt: int,
        started: float,
    ) -> Any:
        """Raise Rejected for an answer that cannot be trained on."""
        oldest = self.answers.oldest_version.get(router_url)  # later answers may be newer, and never older
        answer, reply = await self._exchange(method, url, body, headers, attempt, started)
        wrong = wrong_with(answer, oldest)
        if wrong is not None:
            asked = url.rpartition("/")[0]
            engine_url = answering_engine(reply) or (None if asked == router_url else asked)
            raise Rejected(self.answers.reject(router_url, engine_url, wrong), engine_url)
        return answer

    async def _another_engine(self, url: str, rejected: str | None) -> str:
        """Return where to send a request again whose answer from ``rejected`` is not used: an engine behind the router
        of ``url`` with few such answers, or the router where there is no other or none may be asked directly.
        """
        base, _, endpoint = url.rpartition("/")
        try:
            urls = await self.list_workers(base, "regular")
        except HttpRequestError:
            return url
        others = [each for each in urls if each not in (rejected, base)]
        if not others:
            return url
        return f"{min(others, key=lambda each: (self.answers.rejected[each], random.random()))}/{endpoint}"

    async def fetch_here(self, method: str, url: str, body: bytes | None, headers: dict[str, str]) -> WholeReply:
        """Send a request from this process, and read all of the reply. Raises aiohttp's errors and OSError."""
        session = await self._session(method, url)
        async with session.request(method, url, data=body, headers=headers) as reply:
            raw = await reply.read()
        found = {name.lower(): value for name, value in reply.headers.items()}
        return WholeReply(method, str(reply.url), reply.status, found, reply.content_type, raw)

    async def _exchange(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str], attempt: int, started: float
    ) -> tuple[Any, WholeReply]:
        with transport_errors(method, url, attempt):
            reply = await self.fetch(method, url, body, headers)
        check_status(reply, reply.body, attempt, started)
        try:
            return _decode(reply.body), reply
        except orjson.JSONDecodeError as e:
            text = reply.body.decode("utf-8", "replace")
            if reply.content_type == "application/json" and text:
                raise Retry(f"answered {reply.status} with broken JSON ({e})", reply.status, text) from e
            return text, reply

    async def _open(
        self, method: str, url: str, body: bytes | None, headers: dict[str, str], attempt: int, started: float
    ) -> aiohttp.ClientResponse:
        """Return an answer of which only the head was read."""
        with transport_errors(method, url, attempt):
            session = await self._session(method, url)
            reply = await session.request(method, url, data=body, headers=headers, read_bufsize=STREAM_BUFFER)
            if reply.status >= 400:
                check_status(reply, await reply.read(), attempt, started)
        return reply

    def _abort_unless_left(self, base: str, rid: _AttemptId | None) -> None:
        """Begin to abort a request that has its own id, unless the caller is about to abort everything."""
        if rid is None or base in self._left_to_caller:
            return
        task = asyncio.get_running_loop().create_task(self._abort(base, rid.current))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, base: str, rid: str) -> None:
        """Abort request ``rid`` on every engine behind ``base``.

        Where one cannot be reached, the list of them may be older than a restart: those of a new one get the abort too.
        """
        told: set[str] = set()
        try:
            while urls := [url for url in await self.list_workers(base) if url not in told]:
                posts = [
                    self.post(f"{url}/abort_request", {"rid": rid}, max_retries=1, timeout=ABORT_DEADLINE_S)
                    for url in urls
                ]
                results = await asyncio.gather(*posts, return_exceptions=True)
                for url, result in zip(urls, results, strict=True):
                    if isinstance(result, BaseException):
                        logger.warning("could not abort request %s on %s: %s", rid, url, result)
                        self._workers.pop(base, None)
                told.update(urls)
        except HttpRequestError as e:
            logger.warning("cannot list the engines to abort request %s on: %s", rid, e)


class _ConnectionPools:
    """At most ``concurrency`` connections to each server for long answers, and a few for short ones.

    It belongs to the running loop. Servers do not share connections: a tool that is asked while every engine is busy
    would have to wait for one of their answers.

    Attributes:
        turns: as many as there are connections to one server for long answers.
    """

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.turns = asyncio.Semaphore(concurrency)
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        self._end: AsyncGenerator[None, None] | None = None

    async def session(self, *, short: bool) -> aiohttp.ClientSession:
        """Return the session for a short or a long answer."""
        if self._end is None:
            self._end = self._closed_in_the_end()
            await anext(self._end)
        found = self._sessions.get(short)
        if found is None or found.closed:
            found = self._sessions[short] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=CONTROL_CONNECTIONS if short else 0, limit_per_host=0 if short else self.concurrency
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_DEADLINE_S),
                trust_env=False,
                request_class=aiohttp.ClientRequest,  # it has the keys that ``run_key`` would look up
            )
        return found

    async def close(self) -> None:
        """Close every connection."""
        if self._end is not None:
            await self._end.aclose()

    async def _closed_in_the_end(self) -> AsyncGenerator[None, None]:
        """Close the sessions when the loop ends: ``asyncio.run`` closes the generators that began on its loop, and
        once it is over nothing can close a connection properly."""
        try:
            yield
        finally:
            for session in self._sessions.values():
                await session.close()


class _AttemptId:
    """The id of the attempt in progress: an engine refuses an id it still holds, so each attempt has its own."""

    def __init__(self, payload: Mapping[str, Any]) -> None:
        self.first = payload.get("rid") or uuid.uuid4().hex
        self.current: str = self.first

    def of_attempt(self, attempt: int) -> str:
        self.current = self.first if attempt == 1 else f"{self.first}-{attempt}"
        return self.current


def _is_single_request(payload: object) -> bool:
    """True for one prompt with one answer; the ids of a batch are left to its sender."""
    if not isinstance(payload, Mapping):
        return False
    if payload.get("rid") is not None:
        return isinstance(payload["rid"], str)
    ids, text, params = payload.get("input_ids"), payload.get("text"), payload.get("sampling_params")
    one_prompt = isinstance(text, str) or bool(ids and not isinstance(ids[0], (list, tuple)))
    return one_prompt and not isinstance(params, list) and ((params or {}).get("n") or 1) == 1


def _encode(payload: object) -> bytes | None:
    if payload is None:
        return None
    return orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def _decode(raw: bytes) -> Any:
    """Parse JSON. In a large reply nothing can be garbage yet: the collector would only traverse it again and again,
    which takes more time than to parse it."""
    if len(raw) < _LARGE_BODY:
        return orjson.loads(raw)
    with _gc_lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            return orjson.loads(raw)
        finally:
            if collects:
                gc.enable()
