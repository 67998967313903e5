"""Abort engines until nothing is left in them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from slime.servers.engine_client import EngineClient

logger = logging.getLogger(__name__)

INTERVAL_S = 3.0
DEADLINE_S = 600.0


async def abort_server_until_idle(
    url: str, *, api_key: str | None = None, interval_s: float = INTERVAL_S, deadline_s: float = DEADLINE_S
) -> None:
    """Abort all requests of the engine at ``url`` every ``interval_s`` seconds until it holds none.

    Again and again, because requests that were on their way arrive after an abort. Raises TimeoutError after
    ``deadline_s`` seconds and EngineError when the engine does not answer.
    """
    client = EngineClient(url, api_key=api_key)
    deadline = time.monotonic() + deadline_s
    while True:
        await asyncio.to_thread(client.abort_all)
        left = await asyncio.to_thread(client.num_requests)
        if left == 0:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url} still holds {left} requests after {deadline_s:g} s of aborting them")
        logger.info("%s holds %d requests: aborting again in %g s", url, left, interval_s)
        await asyncio.sleep(interval_s)


async def abort_servers_until_idle(
    urls: Iterable[str], *, api_key: str | None = None, interval_s: float = INTERVAL_S, deadline_s: float = DEADLINE_S
) -> None:
    """Do so on several engines at once."""
    await asyncio.gather(
        *(abort_server_until_idle(url, api_key=api_key, interval_s=interval_s, deadline_s=deadline_s) for url in urls)
    )
