"""Rewards that are no rules: those of a server (``--rm-type remote_rm``) and of chance (``random``)."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

from slime.arguments.args import Args
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

CONNECTIONS, TIMEOUT_S, ATTEMPTS = 64, 120.0, 10
PAUSE_S = 1.0
"""Unit of the pauses between attempts: 2, 4, 8, ... at most 30 of them, and up to one more at random."""
_client: Any = None


def get_client() -> Any:
    """Return the process's client for reward servers."""
    from slime.servers.http_client import HttpClient

    global _client
    if _client is None:
        _client = HttpClient(CONNECTIONS)
    return _client


async def remote_rm(args: Args, sample: Sample) -> Any:
    """Return the JSON reply of ``POST args.rm_url`` with prompt, response and label; see ``ask`` for what is raised."""
    if not args.rm_url:
        raise ValueError("--rm-type remote_rm needs --rm-url")
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    return await ask(args.rm_url, payload, TIMEOUT_S)


async def coin_toss(args: Args, sample: Sample) -> int:
    """Return 0 or 1 by chance."""
    return random.randint(0, 1)


async def ask(url: str, payload: dict[str, Any], timeout: float) -> Any:
    """Return the JSON reply of ``POST url``; ten attempts of at most ``timeout`` s each, from when it is sent.

    At most ``CONNECTIONS`` requests are sent at once: the wait for one's turn is no fault of the server. Raises
    HttpRequestError: at once for a refusal (4xx), else after the last attempt.
    """
    from slime.servers.http_client import HttpRequestError

    attempt = 0
    while True:
        try:
            async with get_client().turn():
                return await get_client().post(url, payload, max_retries=1, timeout=timeout)
        except HttpRequestError as e:
            attempt += 1
            refused = e.status is not None and 400 <= e.status < 500 and e.status != 429
            if refused or attempt >= ATTEMPTS:
                raise
            logger.warning("reward request %d of %d failed: %s", attempt, ATTEMPTS, e)
        await asyncio.sleep(PAUSE_S * (min(2.0**attempt, 30.0) + random.random()))
