"""A stand-in for SGLang engines and their router, for tests of HTTP behaviour only.

It speaks the wire format of ``/generate``, ``/abort_request``, ``/v1/loads`` and ``/workers``, and can be told to be
slow, to fail, to send broken replies or to drop dead. Every server runs on one thread with its own event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web


class ServerThread:
    """An event loop on a daemon thread; ``call`` runs a coroutine there and waits at most 20 s."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def call(self, coro: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coro, self.loop).result(20)

    def stop(self) -> None:
        async def cancel_all() -> None:
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.call(cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


def hashed_reply(input_ids: list[int], params: dict[str, Any]) -> list[int]:
    """A reply that depends on the prompt only: 3 to 10 lower-case letters (as character codes)."""
    digest = hashlib.sha256(json.dumps(input_ids).encode()).digest()
    return [97 + byte % 26 for byte in digest[: 3 + digest[31] % 8]]


@dataclass
class Failure:
    """What to do instead of answering: a status with a body, a cut connection, or raw bytes with status 200."""

    status: int = 200
    body: bytes = b""
    cut: bool = False


@dataclass
class FakeEngine:
    """One engine. ``reply`` gives the whole answer's token ids; ``delay`` is the time per token in seconds."""

    reply: Callable[[list[int], dict[str, Any]], list[int]] = hashed_reply
    delay: float | Callable[[list[int]], float] = 0.0
    weight_version: str = "0"
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborts: list[dict[str, Any]] = field(default_factory=list)
    failures: deque[Failure] = field(default_factory=deque)
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    max_running: int = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/v1/loads", self._loads)
        for path in (
            "/health",
            "/health_generate",
            "/model_info",
            "/get_model_info",
            "/server_info",
            "/get_server_info",
        ):
            app.router.add_get(path, self._info)
        return app

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "fake", "weight_version": self.weight_version, "tp_size": 1})

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": len(self.running), "num_waiting_reqs": 0}]})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.aborts.append(body)
        for rid, stop in self.running.items():
            if body.get("abort_all") or rid == body.get("rid"):
                stop.set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self.failures:
            failure = self.failures.popleft()
            if failure.cut:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            return web.Response(status=failure.status, body=failure.body, content_type="application/json")
        rid = body.get("rid") or f"anonymous-{len(self.requests)}"
        if rid in self.running:
            return web.json_response({"error": {"message": f"Duplicate request ID detected: {rid}"}}, status=400)
        stop = self.running[rid] = asyncio.Event()
        self.max_running = max(self.max_running, len(self.running))
        try:
            return web.json_response(await self._answer(rid, body, stop))
        finally:
            del self.running[rid]

    async def _answer(self, rid: str, body: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
        params = body.get("sampling_params", {})
        ids = body.get("input_ids") or [ord(c) for c in body.get("text", "")]
        whole = self.reply(ids, params)
        limit = params.get("max_new_tokens", 128)
        kind, out = ("stop", whole) if len(whole) <= limit else ("length", whole[:limit])
        delay = self.delay(ids) if callable(self.delay) else self.delay
        sent = 0
        for _ in out:
            if delay:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), delay)
            if stop.is_set():
                kind = "abort"
                break
            sent += 1
        out = out[:sent]
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": {"type": kind},
            "prompt_tokens": len(ids),
            "cached_tokens": len(ids) // 2,
            "completion_tokens": len(out),
            "weight_version": self.weight_version,
            "e2e_latency": delay * sent,
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.5 - token / 1000, token, None] for token in out]
        return {"text": "".join(chr(t) for t in out), "output_ids": out, "meta_info": meta}


@dataclass
class FakeRouter:
    """A router over ``engines``: forwards ``/generate`` in turn, lists ``/workers``, and forwards nothing else.

    A request whose engine breaks the connection is answered 502, one without engines 503.
    """

    engines: list[FakeEngine]
    url: str = ""
    turn: int = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/workers", self._workers)
        return app

    async def _workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"id": str(i), "url": e.url} for i, e in enumerate(self.engines)]})

    async def _generate(self, request: web.Request) -> web.Response:
        if not self.engines:
            return web.json_response({"error": {"code": "no_available_workers"}}, status=503)
        self.turn += 1
        engine = self.engines[self.turn % len(self.engines)]
        headers = {k: v for k, v in request.headers.items() if k.lower().startswith("x-")}
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{engine.url}/generate", data=await request.read(), headers=headers) as reply,
            ):
                return web.Response(status=reply.status, body=await reply.read(), content_type=reply.content_type)
        except aiohttp.ClientError as e:
            return web.json_response({"error": {"message": str(e)}}, status=502)


class FakeCluster:
    """Engines and a router on free loopback ports; a context manager."""

    def __init__(self, count: int = 2, **engine_options: Any) -> None:
        self.engines = [FakeEngine(**engine_options) for _ in range(count)]
        self.router = FakeRouter(list(self.engines))
        self.server = ServerThread()
        self.runners: dict[str, web.AppRunner] = {}

    def __enter__(self) -> FakeCluster:
        for member in (*self.engines, self.router):
            member.url = self.server.call(self._serve(member.app()))
        return self

    def __exit__(self, *exc: object) -> None:
        for url in list(self.runners):
            self.kill(url)
        self.server.stop()

    async def _serve(self, app: web.Application) -> str:
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        url = f"http://127.0.0.1:{port}"
        self.runners[url] = runner
        return url

    @property
    def host(self) -> str:
        return "127.0.0.1"

    @property
    def port(self) -> int:
        return int(self.router.url.rpartition(":")[2])

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [request for engine in self.engines for request in engine.requests]

    def kill(self, url: str) -> None:
        """Stop serving ``url``: cut its connections and free its port."""

        async def stop(runner: web.AppRunner) -> None:
            for engine in self.engines:
                for request in engine.running.values() if engine.url == url else ():
                    request.set()
            assert runner.server is not None
            for connection in list(runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()

        self.server.call(stop(self.runners.pop(url)))

    def kill_engine(self, number: int, *, unregister: bool = True) -> None:
        """Let engine ``number`` drop dead; with ``unregister`` the router stops sending to it."""
        engine = self.engines[number]
        if unregister:
            self.router.engines.remove(engine)
        self.kill(engine.url)

    def wait_until(self, condition: Callable[[], bool], what: str, timeout: float = 10.0) -> None:
        """Wait until ``condition()`` holds; AssertionError naming ``what`` after ``timeout`` s."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"after {timeout} s still not: {what}"
            time.sleep(0.005)
