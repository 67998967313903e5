"""One stand-in engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.support.standin.replies import hashed_reply
from tests.support.standin.wire import Request, Response

CONTEXT_LENGTH = 4096
INFO_PATHS = ("/health", "/model_info", "/get_model_info", "/server_info", "/get_server_info", "/get_weight_version")
DONE_PATHS = ("/flush_cache", "/release_memory_occupation", "/resume_memory_occupation", "/start_profile")


@dataclass
class Failure:
    """Outcome of a request instead of an answer: a status with a body (raw bytes with status 200), a connection
    cut before the reply or, ``truncated``, in the middle of it, or nothing at all forever, not even when aborted.

    ``spoil``: a whole answer that must not be used, with a log-prob that is no number (``nan``), one log-prob too few
    (``short``) or weights of a version from before any push (``old``)."""

    status: int = 200
    body: bytes = b""
    cut: bool = False
    truncated: bool = False
    hang: bool = False
    spoil: str = ""

    def spoilt(self, answer: bytes) -> bytes:
        """Return ``answer`` as this failure leaves it."""
        reply = orjson.loads(answer)
        meta = reply["meta_info"]
        if self.spoil == "old":
            meta["weight_version"] = "default"
        elif meta.get("output_token_logprobs"):
            if self.spoil == "nan":
                meta["output_token_logprobs"][-1][0] = float("nan")
            elif meta["finish_reason"]:
                meta["output_token_logprobs"].pop()
        return orjson.dumps(reply)


class FaultMix:
    """A seeded share of requests fails: ``rates`` are the probabilities of each failure, tried in order."""

    def __init__(self, rates: list[tuple[float, Failure]], seed: int = 0) -> None:
        self.rates = rates
        self.random = random.Random(seed)

    def draw(self) -> Failure | None:
        at = self.random.random()
        for rate, failure in self.rates:
            if at < rate:
                return failure
            at -= rate
        return None


@dataclass
class StandInEngine:
    """``reply`` gives the whole answer's token ids. It takes ``duration`` s, or ``delay`` s per token without that.

    ``slots`` requests run at a time (None: all), the others wait, at most ``max_waiting``: more are answered 503.
    ``failures`` apply to the next requests one by one, ``faults`` any of them, and until ``unavailable_until``
    (time.monotonic) all are answered 503. ``dp_size`` is how many data-parallel ranks it says that it has. Calls of the
    paths in ``hangs_on`` are never answered. ``record`` keeps the bodies and headers of requests.
    """

    reply: Callable[[list[int], dict[str, Any]], list[int]] = hashed_reply
    delay: float | Callable[[list[int]], float] = 0.0
    duration: Callable[[list[int]], float] | None = None
    slots: int | None = None
    max_waiting: int | None = None
    weight_version: str = "0"
    dp_size: int = 1
    record: bool = True
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborts: list[dict[str, Any]] = field(default_factory=list)
    failures: deque[Failure] = field(default_factory=deque)
    faults: FaultMix | None = None
    unavailable_until: float = 0.0
    hangs_on: set[str] = field(default_factory=set)
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    waiting: dict[str, asyncio.Future[bool]] = field(default_factory=dict)
    paused: bool = False
    max_running: int = 0
    stats: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0.0))
    _active: int = 0
    _changed: float = 0.0

    async def handle(self, request: Request) -> Response | None:
        """Answer one request."""
        path = request.path.partition("?")[0]
        if path in self.hangs_on:
            await request.lost.wait()
            return None
        if path == "/generate":
            return await self._generate(request)
        if path == "/v1/loads":
            running = len(self.running) - len(self.waiting)
            loads = {"num_running_reqs": running, "num_waiting_reqs": len(self.waiting)}
            return Response.of_json({"loads": [loads]})
        if path == "/health_generate":
            return Response(503) if time.monotonic() < self.unavailable_until else Response()
        if path in INFO_PATHS:
            info = {
                "model_path": "stand-in",
                "weight_version": self.weight_version,
                "tp_size": 1,
                "dp_size": self.dp_size,
            }
            return Response.of_json(info)
        if path == "/stats":
            self._count(0)
            return Response.of_json({**self.stats, "now": time.monotonic()})
        return self._control(path, orjson.loads(request.body or b"{}"))

    def _control(self, path: str, body: dict[str, Any]) -> Response:
        if path == "/abort_request":
            self.aborts.append(body)
            self._stop(None if body.get("abort_all") else body.get("rid"), everything=bool(body.get("abort_all")))
        elif path == "/pause_generation":
            self.paused = True
            if body.get("mode", "abort") == "abort":
                self._stop(None, everything=True)
        elif path == "/continue_generation":
            self.paused = False
            self._admit()
        elif path.startswith("/update_weights_from_"):
            self.weight_version = str(body.get("weight_version", self.weight_version))
            return Response.of_json({"success": True, "message": "stand-in"})
        elif path not in DONE_PATHS:
            return Response.of_json({"detail": "Not Found"}, 404)
        return Response(content_type="text/plain")

    def _stop(self, rid: str | None, everything: bool) -> None:
        for running, stop in self.running.items():
            if everything or running == rid:
                stop.set()
                if running in self.waiting:
                    self.waiting.pop(running).set_result(False)

    async def _generate(self, request: Request) -> Response | None:
        body = orjson.loads(request.body)
        self.stats["received"] += 1
        if self.record:
            self.requests.append(body)
            self.headers.append(request.headers)
        if time.monotonic() < self.unavailable_until:
            return Response.of_json({"error": {"message": "the engine is starting"}}, 503)
        failure = self.failures.popleft() if self.failures else self.faults.draw() if self.faults else None
        if failure is not None and failure.hang:
            await request.lost.wait()
            return None
        if failure is not None and not (failure.truncated or failure.spoil):
            return None if failure.cut else Response(failure.status, failure.body)
        rid = body.get("rid") or f"anonymous-{self.stats['received']:.0f}"
        if rid in self.running:
            return Response.of_json({"error": {"message": f"Duplicate request ID detected: {rid}"}}, 400)
        if self.max_waiting is not None and not self._is_free() and len(self.waiting) >= self.max_waiting:
            self.stats["refused"] += 1
            return Response.of_json({"error": {"message": "The request queue is full."}}, 503)
        stop = self.running[rid] = asyncio.Event()
        self.max_running = max(self.max_running, len(self.running))
        if body.get("stream"):
            events: asyncio.Queue[bytes] = asyncio.Queue()
            run = asyncio.get_running_loop().create_task(self._run(rid, body, stop, events.put_nowait))
            pieces = self._events(rid, run, events, request.lost, failure)
            return Response(content_type="text/event-stream", pieces=pieces)
        data = await self._run(rid, body, stop)
        if failure is not None and failure.spoil:
            return Response(body=failure.spoilt(data))
        return Response(body=data, sent=len(data) // 2 if failure is not None else None)

    async def _events(
        self,
        rid: str,
        run: asyncio.Task[bytes],
        events: asyncio.Queue[bytes],
        lost: asyncio.Event,
        failure: Failure | None,
    ) -> AsyncGenerator[bytes, None]:
        """The server-sent events of a streamed answer; with a ``failure`` only the first half, or spoilt. A lost reader
        stops it."""
        spoilt = failure.spoilt if failure is not None and failure.spoil else bytes
        gone = asyncio.get_running_loop().create_task(lost.wait())
        try:
            count = 0
            while not (run.done() and events.empty()):
                following = asyncio.get_running_loop().create_task(events.get())
                await asyncio.wait((following, run, gone), return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
                if not following.done():
                    following.cancel()
                    continue
                count += 1
                yield b"data: %b\n\n" % spoilt(following.result())
                if failure is not None and failure.truncated and count >= 2:
                    raise ConnectionResetError("cut in the middle of a stream")
            yield b"data: %b\n\ndata: [DONE]\n\n" % spoilt(run.result())
        finally:
            gone.cancel()
            self._stop(rid, everything=False)
            await asyncio.wait((run,))

    async def _run(
        self, rid: str, body: dict[str, Any], stop: asyncio.Event, tell: Callable[[bytes], None] | None = None
    ) -> bytes:
        try:
            return await self._run_in_slot(rid, body, stop, tell)
        finally:
            del self.running[rid]

    async def _run_in_slot(
        self, rid: str, body: dict[str, Any], stop: asyncio.Event, tell: Callable[[bytes], None] | None
    ) -> bytes:
        """Wait for a slot, take the time the answer takes, and return the reply; ``tell`` what there is meanwhile."""
        admitted = self._is_free()
        if admitted:
            self._count(+1)
        else:
            turn = self.waiting[rid] = asyncio.get_running_loop().create_future()
            admitted = await turn
        try:
            return await self._answer(rid, body, stop, tell)
        finally:
            if admitted:
                self._count(-1)
                self._admit()

    def _is_free(self) -> bool:
        return not self.paused and (self.slots is None or self._active < self.slots)

    def _admit(self) -> None:
        """Hand the free slots to those who have waited longest."""
        while self.waiting and self._is_free():
            self._count(+1)
            self.waiting.pop(next(iter(self.waiting))).set_result(True)

    async def _answer(
        self, rid: str, body: dict[str, Any], stop: asyncio.Event, tell: Callable[[bytes], None] | None
    ) -> bytes:
        params = body.get("sampling_params", {})
        ids = body.get("input_ids") or [ord(c) for c in body.get("text", "")]
        whole = self.reply(ids, params)
        limit = params.get("max_new_tokens", 128)
        limit = CONTEXT_LENGTH - len(ids) if limit is None else limit
        kind, out = ("stop", whole) if len(whole) <= limit else ("length", whole[:limit])
        began = time.monotonic()
        seconds = self._seconds(ids, len(out))
        steps = len(out) if tell else 1
        for step in range(steps):
            await self._wait(stop, seconds / steps)
            if stop.is_set():
                done = (time.monotonic() - began) / seconds if seconds else 0.0
                kind, out = "abort", out[: step if tell else min(len(out), int(done * len(out)))]
                break
            if tell and step + 1 < steps:
                tell(self._reply(rid, body, ids, out[: step + 1], None, began))
        self.stats["tokens"] += len(out)
        self.stats["aborted" if kind == "abort" else "finished"] += 1
        self.stats["aborted_tokens"] += len(out) if kind == "abort" else 0
        return self._reply(rid, body, ids, out, {"type": kind}, began)

    async def _wait(self, stop: asyncio.Event, seconds: float) -> None:
        if seconds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await stop.wait()

    def _reply(
        self,
        rid: str,
        body: dict[str, Any],
        ids: list[int],
        out: list[int],
        finish: dict[str, str] | None,
        began: float,
    ) -> bytes:
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": finish,
            "prompt_tokens": len(ids) + sum(_tokens_of_image(url) - 1 for url in body.get("image_data") or []),
            "cached_tokens": len(ids) // 2,
            "completion_tokens": len(out),
            "weight_version": self.weight_version,
            "e2e_latency": time.monotonic() - began,
        }
        tokens = tuple(out)
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = orjson.Fragment(_log_probs(tokens))
        return orjson.dumps(
            {"text": _text(tokens), "output_ids": out if len(out) < 64 else orjson.Fragment(_ids(tokens)),
             "meta_info": meta}
        )  # fmt: skip

    def _seconds(self, ids: list[int], tokens: int) -> float:
        if self.duration is not None:
            return self.duration(ids)
        return (self.delay(ids) if callable(self.delay) else self.delay) * tokens

    def _count(self, change: int) -> None:
        """Add up how many requests ran for how long (``slot_seconds``) until this moment."""
        now = time.monotonic()
        self.stats["slot_seconds"] += self._active * (now - (self._changed or now))
        self._active += change
        self._changed = now


_COUNTS = ("received", "refused", "finished", "aborted", "tokens", "aborted_tokens", "slot_seconds")


@functools.lru_cache(64)
def _tokens_of_image(url: str) -> int:
    from slime.utils.images import open_image
    from tests.support.vision import tokens_of

    return tokens_of(open_image(url))


@functools.lru_cache(64)
def _log_probs(tokens: tuple[int, ...]) -> bytes:
    return orjson.dumps([[-0.5 - token / 1000, token, None] for token in tokens])


@functools.lru_cache(64)
def _ids(tokens: tuple[int, ...]) -> bytes:
    return orjson.dumps(tokens)


@functools.lru_cache(64)
def _text(tokens: tuple[int, ...]) -> str:
    return "".join(chr(token) for token in tokens)
