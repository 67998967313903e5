"""Requests that are sent by helper processes on every node, with their own ports and open files
(``--use-distributed-post``)."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

import aiohttp
import ray

from slime.arguments.args import Args
from slime.ray import cluster
from slime.ray.actors import worker
from slime.servers.http_client import HttpClient
from slime.servers.http_replies import WholeReply
from slime.servers.http_utils import get_rollout_num_engines
from slime.utils.network import connection_limit

logger = logging.getLogger(__name__)

START_DEADLINE_S = 120.0


class Poster:
    """A Ray actor that sends at most ``connections`` requests at a time, and returns replies as they came."""

    def __init__(self, args: Args, number: int, connections: int) -> None:
        worker.begin(args, f"poster_{number}")
        self._client = HttpClient(connection_limit(connections))

    async def connections(self) -> int:
        """Return how many requests it can send at a time."""
        return self._client.concurrency

    async def fetch(self, method: str, url: str, body: bytes | None, headers: dict[str, str]) -> WholeReply | str:
        """Return the reply, or how the connection failed: not all of aiohttp's errors can be pickled."""
        try:
            return await self._client.fetch_here(method, url, body, headers)
        except (aiohttp.ClientError, OSError) as e:
            return f"{type(e).__name__}: {e}"


class Posters:
    """A poster per node of the Ray cluster, which take turns; ``fetch`` is for ``HttpClient``.

    A poster that ends with its node is done without; its requests are sent again. Without any, and for questions and
    aborts, requests are sent from this process.
    """

    def __init__(self, args: Args, client: HttpClient, wiring: dict[str, Any]) -> None:
        """Start the posters, and let as many requests be in flight as they can send. Raises GetTimeoutError."""
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        wanted = args.sglang_server_concurrency * get_rollout_num_engines(args)
        each = math.ceil(wanted / len(nodes))
        self._client, self._turn = client, 0
        self._actors: list[Any] = [
            ray.remote(Poster)
            .options(
                num_cpus=0,
                max_concurrency=each + 1,
                runtime_env=wiring["runtime_env"],
                **cluster.on_node(node),
            )
            .remote(args, number, each)
            for number, node in enumerate(nodes)
        ]
        limits = ray.get([actor.connections.remote() for actor in self._actors], timeout=START_DEADLINE_S)
        client.concurrency = min(wanted, sum(limits))
        client.fetch = self.fetch
        logger.info("%d helper processes send up to %d requests at a time", len(nodes), client.concurrency)

    async def fetch(self, method: str, url: str, body: bytes | None, headers: dict[str, str]) -> WholeReply:
        """As ``HttpClient.fetch_here``; a request that is cancelled is cancelled there too."""
        if not self._actors or method == "GET" or url.endswith("/abort_request"):
            return await self._client.fetch_here(method, url, body, headers)
        self._turn += 1
        actor = self._actors[self._turn % len(self._actors)]
        asked = actor.fetch.remote(method, url, body, headers)
        try:
            reply: WholeReply | str = await asked
        except asyncio.CancelledError:
            ray.cancel(asked)
            raise
        except ray.exceptions.RayActorError as e:
            if actor in self._actors:
                self._actors.remove(actor)
                logger.warning("a process that sent requests has ended; %d are left: %s", len(self._actors), e)
            raise aiohttp.ClientError("the process that sent it has ended") from e
        if isinstance(reply, str):
            raise aiohttp.ClientError(reply)
        return reply
