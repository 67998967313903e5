"""The buffer's server: ``python -m slime_plugins.rollout_buffer.buffer``.

Generators write trajectories to ``/buffer/write``, the training run fetches groups of them at ``/get_rollout_data``
and has the generator of its task started at ``/start_rollout``. All of them need the key (``key_file``).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import orjson
from aiohttp import web

from slime.servers.auth import bearer_token, is_key, is_loopback
from slime.servers.bounded_site import run_app
from slime.servers.key_file import KEY_VARIABLE, shared_key
from slime.servers.request_checks import RequestError, browser_guard, read_json
from slime.utils.plain_numbers import is_integer, is_number
from slime_plugins.rollout_buffer.generators import GeneratorProcess, find_generators
from slime_plugins.rollout_buffer.group_queue import BufferFull, GroupFunctions, GroupQueue, ItemError

logger = logging.getLogger(__name__)

PORT = 8889
LONGEST_WAIT_S = 60.0
LARGEST_GROUP = 100_000
HEALTH = "/healthz"
"""Whoever waits for the server asks here, and needs no key."""
SHUTDOWN_S = 5.0
"""So long a server that ends waits for requests that are being answered."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class RolloutBuffer:
    """State of the server: the queue of the rollout in progress, and the generator that fills it."""

    generators: dict[str, ModuleType]
    max_items: int = 100_000
    queue: GroupQueue | None = None
    generator: GeneratorProcess | None = None
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _watching: asyncio.Task[None] | None = None

    async def start_rollout(self, data: dict[str, Any]) -> dict[str, Any]:
        """Start the generator of ``data["task_type"]`` on an empty queue, in the place of one that is at work.

        Raises ItemError for data that no generator can be started with.
        """
        module = self.generators.get(str(data.get("task_type")))
        if module is None:
            raise ItemError(f"task_type must be one of {sorted(self.generators)}, got {data.get('task_type')!r:.100}")
        group_size, vocab_size, reward_key = _of_groups(data)
        async with self.starting:
            await self.stop()
            dropped = 0 if self.queue is None else self.queue.held
            if dropped:
                logger.warning("%d trajectories of the rollout before are dropped: it starts again", dropped)
            functions = GroupFunctions.of_module(module)
            self.queue = GroupQueue(
                group_size, module.TASK_TYPE, functions, self.max_items, vocab_size=vocab_size, reward_key=reward_key
            )
            self.generator = GeneratorProcess(module, data)
            await self.generator.start()
            self._watching = asyncio.create_task(self._watch(self.generator))
        return {"message": "Rollout started", "dropped_items": dropped}

    async def stop(self) -> None:
        """End the generator, if one is at work."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self.generator is not None:
            await self.generator.stop()
        self.generator = self._watching = None

    async def write(self, item: dict[str, Any]) -> None:
        """Take one trajectory; see ``GroupQueue.write``. Without a rollout that was started here, groups are of one."""
        if self.queue is None:
            self.queue = GroupQueue(1, "", max_items=self.max_items)
        self.queue.write(item)
        if self.queue.ready:
            await self._tell()

    async def read(self, wait_s: float, **acknowledged: Any) -> dict[str, Any]:
        """Return the groups that are ready; when there is none, wait for one, or for the generator's end."""
        if wait_s > 0 and self.queue is not None:
            async with self.changed:
                try:
                    async with asyncio.timeout(min(wait_s, LONGEST_WAIT_S)):
                        await self.changed.wait_for(lambda: self._has_news(**acknowledged))
                except TimeoutError:
                    pass
        state = {"state": "none"} if self.generator is None else self.generator.state()
        if self.queue is None:
            return _reply(False, "no rollout was started and nothing written", [], {"generator": state})
        data, meta_info = self.queue.read(**acknowledged)
        meta_info["generator"] = state
        message = f"{len(data)} trajectories" if data else f"no group is ready; the generator: {state['state']}"
        return _reply(bool(data), message, data, meta_info)

    def _has_news(self, **acknowledged: Any) -> bool:
        ready = self.queue is None or self.queue.has_data(**acknowledged)
        ended = self.generator is not None and self.generator.state()["state"] != "running"
        return ready or ended

    async def _watch(self, generator: GeneratorProcess) -> None:
        code = await generator.wait()
        (logger.info if code == 0 else logger.error)("generator %s ended with %d", generator.module.__name__, code)
        await self._tell()

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


def _of_groups(data: dict[str, Any]) -> tuple[int, int | None, str | None]:
    """Return what a run says of its groups: their size, and where they are known its vocabulary and reward key."""
    given, vocab_size, reward_key = (data.get(k) for k in ("num_repeat_per_sample", "vocab_size", "reward_key"))
    size = int(given) if isinstance(given, str) and given.isdecimal() and len(given) < 10 else given
    if not is_integer(size) or not 1 <= size <= LARGEST_GROUP:
        raise ItemError(f"num_repeat_per_sample must be at least 1, at most {LARGEST_GROUP}, got {given!r:.100}")
    if vocab_size is not None and not (is_integer(vocab_size) and vocab_size > 0):
        raise ItemError(f"vocab_size must be a number of tokens, got {vocab_size!r:.100}")
    if reward_key is not None and not isinstance(reward_key, str):
        raise ItemError(f"reward_key must be a text, got {reward_key!r:.100}")
    return size, vocab_size, reward_key


def _reply(success: bool, message: str, data: list[Any], meta_info: dict[str, Any]) -> dict[str, Any]:
    return {"success": success, "message": message, "data": {"data": data, "meta_info": meta_info}}


def make_app(buffer: RolloutBuffer, *, key: str, max_body: int = 256 << 20) -> web.Application:
    """Return the application that serves ``buffer``. Requests must carry ``key`` as their bearer token."""

    async def write(request: web.Request) -> web.Response:
        await buffer.write(await read_json(request))
        return _answer({"success": True, "message": "written", "data": {"data": [], "meta_info": "write success"}})

    async def read(request: web.Request) -> web.Response:
        asked = await read_json(request)
        if not isinstance(asked, dict):
            raise ItemError(f"expected an object, got {type(asked).__name__}")
        wait_s, acknowledged = asked.get("wait_s", 0), asked.get("acknowledged")
        if not is_number(wait_s) or not (acknowledged is None or is_integer(acknowledged)):
            raise ItemError(f"wait_s and acknowledged must be numbers, got {wait_s!r:.50} and {acknowledged!r:.50}")
        return _answer(
            await buffer.read(float(wait_s), acknowledged=acknowledged, acknowledges="acknowledged" in asked)
        )

    async def start(request: web.Request) -> web.Response:
        data = await read_json(request)
        if not isinstance(data, dict):
            raise ItemError(f"expected an object, got {type(data).__name__}")
        return _answer(await buffer.start_rollout(data))

    async def health(request: web.Request) -> web.Response:
        state = buffer.queue.state() if buffer.queue is not None and _has_key(request, key) else {}
        return _answer({"ok": True, **state})

    async def shutdown(app: web.Application) -> None:
        # Before the open requests are waited for, not after: a server that closes reads no more, so that a generator
        # whose trajectory is half sent would hold it for the whole of its timeout.
        await buffer.stop()

    app = web.Application(client_max_size=max_body, middlewares=[browser_guard(_refusal), _errors, _guard(key)])
    app.router.add_post("/buffer/write", write)
    app.router.add_post("/get_rollout_data", read)
    app.router.add_post("/start_rollout", start)
    app.router.add_get(HEALTH, health)
    app.on_shutdown.append(shutdown)
    return app


def _has_key(request: web.Request, key: str) -> bool:
    return is_key(bearer_token(request.headers.get("Authorization")), key)


def _guard(key: str) -> Any:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != HEALTH and not _has_key(request, key):
            return _refusal(401, f"give the key of {KEY_VARIABLE}, or of ~/.slime/key, as bearer token")
        return await handler(request)

    return middleware


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ItemError as e:
        return _refusal(400, str(e))
    except BufferFull as e:
        return _refusal(429, str(e), {"Retry-After": "1"})
    except RequestError as e:
        return _refusal(e.status, e.message)
    except web.HTTPException as e:
        return _refusal(e.status, e.text or e.reason)
    except Exception as e:
        logger.exception("%s failed", request.path)
        return _refusal(500, f"{type(e).__name__}: {e}")


def _refusal(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return _answer({"success": False, "message": message}, status, headers)


def _answer(value: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json", headers=headers)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m slime_plugins.rollout_buffer.buffer", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help=f"address to listen on; not loopback needs {KEY_VARIABLE}")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--generator", action="append", default=[], metavar="MODULE", help="of your own; repeatable")
    parser.add_argument("--max-items", type=int, default=100_000, help="trajectories held before writers have to wait")
    parser.add_argument("--max-body-mib", type=int, default=256, help="size of one request")
    words = parser.parse_args()
    if not os.environ.get(KEY_VARIABLE) and not is_loopback(words.host):
        parser.error(f"--host {words.host} can be reached from elsewhere: set {KEY_VARIABLE}, there and in the run")
    logging.basicConfig(level=logging.INFO)
    try:
        generators = find_generators(words.generator)
    except (ImportError, ValueError) as e:
        parser.error(f"--generator: {e}")
    app = make_app(RolloutBuffer(generators, words.max_items), key=shared_key(), max_body=words.max_body_mib << 20)
    run_app(app, words.host, words.port, access_log=None, shutdown_timeout=SHUTDOWN_S)


if __name__ == "__main__":
    main()
