"""A rollout buffer and an engine's chat address, served on a thread of this process."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from aiohttp import web

from slime.servers.bounded_site import RUNNER_OPTIONS, BoundedSite
from slime.servers.key_file import shared_key
from slime_plugins.rollout_buffer.buffer import SHUTDOWN_S, RolloutBuffer, make_app
from slime_plugins.rollout_buffer.generators import find_generators
from tests.support.standin import ServerThread


class ServedBuffer:
    """A buffer on a free port, its generators those of the package and ``modules``; a context manager.

    Without ``key`` it is the one that this user's programs find.
    """

    def __init__(
        self, *modules: str, key: str | None = None, shutdown_timeout: float = SHUTDOWN_S, **options: Any
    ) -> None:
        self.buffer = RolloutBuffer(find_generators(list(modules)), **options)
        self.key, self.shutdown_timeout = key or shared_key(), shutdown_timeout
        self.server = ServerThread()
        self.runners: list[web.AppRunner] = []
        self.url = ""

    def serve(self, app: web.Application) -> str:
        """Serve another application too; return its URL."""
        return self.server.call(self._serve(app))

    async def _serve(self, app: web.Application) -> str:
        runner = web.AppRunner(app, shutdown_timeout=self.shutdown_timeout, **RUNNER_OPTIONS)
        await runner.setup()
        self.runners.append(runner)
        await BoundedSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of a request."""
        return {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}

    def __enter__(self) -> ServedBuffer:
        self.url = self.serve(make_app(self.buffer, key=self.key, max_body=1 << 20))
        return self

    def __exit__(self, *exc: object) -> None:
        for runner in self.runners:
            self.server.call(runner.cleanup())
        self.server.stop()


class ChatEngine:
    """Answers ``/v1/chat/completions`` with the number in the question, boxed; every fifth time a question is asked
    with a wrong one. Fails a question with ``fail`` in it, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._complete)
        return app

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        question = body["messages"][-1]["content"]
        self.asked[question] += 1
        await asyncio.sleep(0)
        if "fail" in question:
            return web.json_response({"error": "no"}, status=500)
        number = "".join(c for c in question if c.isdigit())
        answer = number if self.asked[question] % 5 else "wrong"
        choice = {"message": {"role": "assistant", "content": rf"so \boxed{{{answer}}}"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice]})
