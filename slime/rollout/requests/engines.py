"""The loads of a run's engines, and aborts of their requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from slime.arguments.args import Args
from slime.servers.http_client import HttpRequestError
from slime.servers.http_utils import get_http_client, get_rollout_num_engines
from slime.servers.loads import num_requests_from_load, num_waiting_from_load
from slime.utils.network import join_address

logger = logging.getLogger(__name__)

FIRST_POLL_S, POLL_S = 0.01, 0.2
"""Aborted requests leave an engine within a step of its scheduler: the first looks come quickly."""
REPEAT_ABORT_S = 3.0
PROBE_DEADLINE_S = 3.0
LOAD_DEADLINE_S = 3.0
"""The load of an engine that does not report it within this time is left out."""
ASKED_AT_ONCE = 64
"""Engines whose load is fetched at the same time."""
DESCRIBED = 8
"""Engines that a message describes."""
SHORTEST_QUEUE = 8


def model_url(args: Args, model_name: str, endpoint: str) -> str:
    """Return the URL of ``endpoint`` at the router of ``model_name``.

    ``default`` is the model that rollouts ask: the first that is served, unless another has that name. Where one model
    is served every name means it. Raises ValueError for an unknown name where there are several.
    """
    routers = getattr(args, "sglang_model_routers", None) or {}  # no flag: set where slime starts the routers
    if model_name not in routers and model_name != "default" and len(routers) > 1:
        raise ValueError(f"no model {model_name!r} is served (--sglang-config); there are {', '.join(routers)}")
    host, port = routers.get(model_name) or (args.sglang_router_ip, args.sglang_router_port)
    return f"http://{join_address(host, port)}{endpoint}"


def router_urls(args: Args) -> list[str]:
    """Return the addresses of the run's own routers."""
    routers = list((getattr(args, "sglang_model_routers", None) or {}).values())  # no flag, as above
    routers.append((args.sglang_router_ip, args.sglang_router_port))
    return [f"http://{join_address(host, port)}" for host, port in routers if host]


def num_engines_asked(args: Args) -> int:
    """Return the number of engines that generate the responses of rollouts: those of the first model."""
    engines = getattr(args, "sglang_model_engines", None)  # no flag: set where slime starts the engines
    return next(iter(engines.values())) if engines else get_rollout_num_engines(args)


async def abort_all_until_idle(router_url: str, deadline_s: float) -> None:
    """Abort every request on the engines behind ``router_url`` and wait until none is left.

    An engine that does not answer is left alone with a warning: its health is not decided here. Raises TimeoutError
    naming the engines that still have requests after ``deadline_s`` s.
    """
    try:
        urls = await get_http_client().list_workers(router_url)
    except HttpRequestError as e:
        logger.warning("cannot list the engines to stop: %s", e)
        return
    left = await asyncio.gather(*(_abort_until_idle(url, deadline_s) for url in urls))
    busy = {url: count for url, count in zip(urls, left, strict=True) if count}
    if busy:
        raise TimeoutError(f"engines still have requests {deadline_s:g} s after the abort: {busy}")


async def _abort_until_idle(url: str, deadline_s: float) -> int:
    """Return the number of requests left on the engine at ``url``."""
    client = get_http_client()
    deadline = time.monotonic() + deadline_s
    next_abort, pause = 0.0, FIRST_POLL_S
    while True:
        try:
            if time.monotonic() >= next_abort:
                await client.post(f"{url}/abort_request", {"abort_all": True}, max_retries=3, timeout=10)
                next_abort = time.monotonic() + REPEAT_ABORT_S
            left = num_requests_from_load(await client.get(f"{url}/v1/loads?include=core", timeout=10))
        except HttpRequestError as e:
            logger.warning("engine %s does not answer the request to abort: %s", url, e)
            return 0
        if left <= 0:
            return 0
        if time.monotonic() >= deadline:
            return left
        await asyncio.sleep(pause)
        pause = min(POLL_S, 2 * pause)


async def describe_engines(router_url: str) -> str:
    """Say what each engine behind ``router_url`` is doing, for the message of a request that was not answered."""
    client = get_http_client()
    try:
        urls = await client.list_workers(router_url)
    except HttpRequestError as e:
        return f"{router_url} does not say which engines it has: {e}"
    described = await asyncio.gather(*(_describe_engine(url) for url in urls[:DESCRIBED]))
    more = [f"and {len(urls) - DESCRIBED} more engines"] if len(urls) > DESCRIBED else []
    return "; ".join([*described, *more]) or f"{router_url} has no engine"


async def _describe_engine(url: str) -> str:
    try:
        load = await get_http_client().get(f"{url}/v1/loads?include=core", timeout=PROBE_DEADLINE_S)
        return f"engine {url} holds {num_requests_from_load(load)} requests"
    except (HttpRequestError, ValueError) as e:
        return f"engine {url} does not report its load: {e}"


@dataclass(frozen=True)
class EngineLoad:
    """Requests that an engine works on, and that wait there."""

    running: int
    waiting: int

    @property
    def surplus(self) -> int:
        """The number of requests that wait beyond those that should (below 0: fewer wait)."""
        wanted = max(SHORTEST_QUEUE, self.running // 4)
        if not self.waiting:
            return -max(wanted, self.running)  # it may be idle in part, and can take as many again
        if not self.running:
            return 0  # it is paused, or about to begin
        return self.waiting - wanted


class EngineLoads:
    """The loads that the engines behind a router report which generate responses. ``router_url`` is called for the
    address when it is needed.
    """

    def __init__(self, router_url: Callable[[], str], planned: int | Callable[[], int] = 0) -> None:
        self.router_url = router_url
        self._planned = planned
        self.listed = 0
        """The most engines that the router ever had, no more than are planned: one that was replaced may still have
        been on its list beside its successor."""

    @property
    def planned(self) -> int:
        """The engines of the run, 0 when that is not known. Engines may join and leave."""
        return self._planned() if callable(self._planned) else self._planned

    async def read(self) -> list[EngineLoad]:
        """Return the loads of the engines that answer."""
        urls = await get_http_client().list_workers(self.router_url(), "regular", "decode")
        listed = max(self.listed, len(urls))
        self.listed = min(self.planned, listed) if self.planned else listed
        loads: list[EngineLoad | None] = [None] * len(urls)
        left = iter(range(len(urls)))

        async def read_next() -> None:
            for number in left:
                loads[number] = await self._load_of(urls[number])

        await asyncio.gather(*(read_next() for _ in urls[:ASKED_AT_ONCE]))
        return [load for load in loads if load is not None]

    async def _load_of(self, url: str) -> EngineLoad | None:
        try:
            reply = await get_http_client().get(f"{url}/v1/loads?include=core", timeout=LOAD_DEADLINE_S)
            waiting = num_waiting_from_load(reply)
            return EngineLoad(num_requests_from_load(reply) - waiting, waiting)
        except (HttpRequestError, ValueError) as e:
            logger.debug("engine %s does not report its load: %s", url, e)
            return None
