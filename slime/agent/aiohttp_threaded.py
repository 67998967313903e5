"""An aiohttp application on a separate thread, beside code that has another event loop or none."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from slime.servers import http_utils
from slime.servers.auth import is_loopback
from slime.servers.bounded_site import PLAIN_RUNNER_OPTIONS, RUNNER_OPTIONS, BoundedSite, noted, tells_connections
from slime.utils.bounded_log import BoundedLog

logger = logging.getLogger(__name__)

REQUIRES_TOKEN = web.AppKey("requires_token", bool)
"""Set by applications that refuse requests of other hosts without a token they know."""

SLOW_REQUEST_S = 120.0
STOP_DEADLINE_S = 30.0
_RUNNER_DEFAULTS: dict[str, Any] = {"handler_cancellation": True, "shutdown_timeout": 5.0}


@dataclass
class AppHandle:
    """A running application: ``port`` is the one it really listens on."""

    host: str
    port: int
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    runner: web.AppRunner
    _stopping: threading.Event = field(default_factory=threading.Event, repr=False)

    def stop(self) -> None:
        """Cancel its requests, free the port and end the thread. Does nothing the second time."""
        if not self._stopping.is_set():
            self._stopping.set()
            self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(STOP_DEADLINE_S)
        if self.thread.is_alive():
            logger.warning("the application on port %d has not ended within %.0f s", self.port, STOP_DEADLINE_S)


_told: dict[int, BoundedLog] = {}


class FilteredAccessLogger(AbstractAccessLogger):
    """Logs what is worth reading: errors, and requests that took two minutes or more; no HEAD, no quick 200."""

    def __init__(self, logger: logging.Logger, log_format: str) -> None:
        super().__init__(logger, log_format)
        self._told = _told.setdefault(id(logger), BoundedLog(logger, logging.INFO))  # one for all connections

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """Log one finished request; ``time`` in seconds."""
        if request.method == "HEAD" or (response.status == 200 and time < SLOW_REQUEST_S):
            return
        if self._told.admits():
            self.logger.info(
                "%s %s %s: %d in %.1f s", request.remote, request.method, request.path, response.status, time
            )


def run_app_in_thread(
    app: web.Application,
    *,
    host: str = "0.0.0.0",
    port: int = 0,
    thread_name: str = "aiohttp-app",
    start_timeout_sec: float = 15.0,
    runner_kwargs: Mapping[str, Any] | None = None,
) -> AppHandle:
    """Serve ``app`` on ``host`` and ``port`` (0: any free one) from a daemon thread; return when it listens.

    ``runner_kwargs`` go to ``web.AppRunner``. The handlers of disconnected clients are cancelled. Raises what kept it
    from listening (OSError for a port in use) and TimeoutError after ``start_timeout_sec``.
    """
    site_options = RUNNER_OPTIONS
    if not tells_connections(app):  # its handlers read bodies with aiohttp's own means
        app.middlewares.insert(0, noted)
        site_options = PLAIN_RUNNER_OPTIONS
    options = {"access_log_class": FilteredAccessLogger, **_RUNNER_DEFAULTS, **site_options, **(runner_kwargs or {})}
    runner = web.AppRunner(app, **options)
    started: Future[tuple[asyncio.AbstractEventLoop, int]] = Future()
    listen = _listen(runner, host, port, start_timeout_sec)
    thread = threading.Thread(target=_serve, args=(runner, listen, started), name=thread_name, daemon=True)
    thread.start()
    loop, bound = started.result()
    _warn_if_exposed(app, host, bound)
    return AppHandle(host, bound, thread, loop, runner)


def _serve(
    runner: web.AppRunner,
    listen: Coroutine[Any, Any, int],
    started: Future[tuple[asyncio.AbstractEventLoop, int]],
) -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        bound = loop.run_until_complete(listen)
        loop.call_soon(started.set_result, (loop, bound))
        loop.run_forever()
    except BaseException as e:  # noqa: BLE001  (raised where the application was to be started)
        started.set_exception(e)
    finally:
        loop.run_until_complete(_clean_up(runner))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


async def _listen(runner: web.AppRunner, host: str, port: int, deadline: float) -> int:
    try:
        async with asyncio.timeout(deadline):
            await runner.setup()
            await BoundedSite(runner, host, port).start()
    except TimeoutError as e:
        raise TimeoutError(
            f"the application was not listening on {host}:{port} within {deadline:g} s; look for a start-up callback "
            "of it that waits for something"
        ) from e
    except OSError as e:
        e.add_note(f"No application could listen on {host}:{port}. Port 0 takes any free one.")
        raise
    return int(runner.addresses[0][1])


async def _clean_up(runner: web.AppRunner) -> None:
    await runner.cleanup()
    client = http_utils._http_client  # keeps connections per event loop, and this one ends
    if client is not None:
        await client.close()


def _warn_if_exposed(app: web.Application, host: str, port: int) -> None:
    if is_loopback(host):
        return
    if app.get(REQUIRES_TOKEN):
        logger.info("listening on %s:%d; requests need the token of an open session", host, port)
        return
    logger.warning(
        "listening on %s:%d WITHOUT A TOKEN: whoever can reach this host can use the application. Bind 127.0.0.1 when "
        "its clients run on this host, or keep the port behind a firewall.",
        host,
        port,
    )
