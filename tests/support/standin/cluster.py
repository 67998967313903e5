"""Stand-in engines and a router on a thread of this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.support.standin.engine import StandInEngine
from tests.support.standin.router import StandInRouter
from tests.support.standin.wire import Listener


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


class StandInCluster:
    """``count`` engines and a router on free loopback ports; a context manager."""

    def __init__(self, count: int = 2, **engine_options: Any) -> None:
        self.engines = [StandInEngine(**engine_options) for _ in range(count)]
        self.router = StandInRouter(list(self.engines))
        self.server = ServerThread()
        self.listeners: dict[str, Listener] = {}

    def __enter__(self) -> StandInCluster:
        for member in (*self.engines, self.router):
            listener = Listener(member.handle)
            member.url = self.server.call(listener.start())
            self.listeners[member.url] = listener
        return self

    def __exit__(self, *exc: object) -> None:
        for url in list(self.listeners):
            self.kill(url)
        self.server.stop()

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
        self.server.call(self.listeners.pop(url).drop_dead())

    def kill_engine(self, number: int, *, unregister: bool = True) -> None:
        """Let engine ``number`` drop dead; with ``unregister`` the router stops sending to it."""
        engine = self.engines[number]
        if unregister:
            self.server.loop.call_soon_threadsafe(self.router.engines.remove, engine)
        self.kill(engine.url)

    def wait_until(self, condition: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
        """Wait until ``condition()`` holds; AssertionError naming ``what`` after ``timeout`` s."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"after {timeout} s still not: {what}"
            time.sleep(0.005)
