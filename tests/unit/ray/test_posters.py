"""Requests that go through helper processes, which are in this one here: replies, errors, ends, cancellation."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from slime.ray.manager import posters
from slime.ray.manager.posters import Poster, Posters
from slime.rollout.requests.generate_state import request_limit
from slime.servers import http_client, http_utils
from slime.servers.http_client import HttpClient, HttpRequestError
from tests.support.arguments import run_args
from tests.support.standin import Failure, StandInCluster

REQUEST = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}}


class Actor:
    """The handle of a poster: its calls are tasks, and fail when its node has ended."""

    def __init__(self, args: Any, number: int, connections: int) -> None:
        self.poster, self.has_ended, self.calls = Poster(args, number, connections), False, 0
        self.connections = SimpleNamespace(remote=lambda: self.poster._client.concurrency)
        self.fetch = SimpleNamespace(remote=self.call)

    def call(self, *request: Any) -> asyncio.Task[Any]:
        self.calls += 1
        return asyncio.ensure_future(self._fetch(request))

    async def _fetch(self, request: tuple[Any, ...]) -> Any:
        if self.has_ended:
            raise ray.exceptions.ActorDiedError
        return await self.poster.fetch(*request)


class FakeRay:
    exceptions = ray.exceptions

    def __init__(self) -> None:
        self.actors: list[Actor] = []

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": f"{i:056x}", "Alive": i != 2} for i in range(3)]

    def remote(self, of: type[Poster]) -> Any:
        def start(*words: Any) -> Actor:
            self.actors.append(Actor(*words))
            return self.actors[-1]

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))

    def get(self, refs: list[Any], timeout: float) -> list[Any]:
        return refs

    def cancel(self, ref: asyncio.Task[Any]) -> None:
        ref.cancel()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(posters, "ray", fake)
    monkeypatch.setattr(posters.cluster, "on_node", lambda node: {})
    monkeypatch.setattr(posters.worker, "begin", lambda args, component: None)
    monkeypatch.setattr(http_client, "BACKOFF_BASE_S", 0.01)
    return fake


@pytest.fixture
async def client(world: FakeRay, monkeypatch: pytest.MonkeyPatch):
    one = HttpClient(1, request_timeout=10.0)
    monkeypatch.setattr(http_utils, "_http_client", one)
    Posters(
        run_args("--use-distributed-post", sglang_server_concurrency=3, rollout_num_engines=3), one, {"runtime_env": {}}
    )
    yield one
    for actor in world.actors:
        await actor.poster._client.close()
    await one.close()


async def test_posters_of_all_nodes_take_turns(world: FakeRay, client: HttpClient) -> None:
    args = run_args("--use-distributed-post", sglang_server_concurrency=3, rollout_num_engines=3)
    assert [actor.poster._client.concurrency for actor in world.actors] == [5, 5]  # of 9, on the two nodes that live
    assert client.concurrency == request_limit(args) == 9
    with StandInCluster(1) as cluster:
        url = cluster.engines[0].url
        replies = await asyncio.gather(*(client.post(f"{url}/generate", REQUEST) for _ in range(6)))
        assert all(len(reply["output_ids"]) == 4 for reply in replies)
        assert [actor.calls for actor in world.actors] == [3, 3]
        assert await client.post(f"{url}/abort_request", {"rid": "none"}) == ""  # from here
        assert (await client.get(f"{url}/model_info"))["model_path"] == "stand-in"
        assert sum(actor.calls for actor in world.actors) == 6


async def test_refusals_and_broken_connections_are_what_they_are_without(world: FakeRay, client: HttpClient) -> None:
    with StandInCluster(1) as cluster:
        url = cluster.engines[0].url
        cluster.engines[0].failures.append(Failure(400, b"too long"))
        with pytest.raises(HttpRequestError, match=r"was refused \(status 400, 1 attempt.*too long"):
            await client.post(f"{url}/generate", REQUEST)
        cluster.engines[0].failures.append(Failure(503, b"busy"))
        await client.post(f"{url}/generate", REQUEST)
        assert len(cluster.requests) == 3
    with pytest.raises(HttpRequestError, match="ClientConnectorError: Cannot connect"):
        await client.post(f"{url}/generate", REQUEST, max_retries=2)


async def test_a_poster_that_ends_is_done_without(world: FakeRay, client: HttpClient) -> None:
    with StandInCluster(1) as cluster:
        url = cluster.engines[0].url
        for ended in range(2):
            world.actors[ended].has_ended = True
            for _ in range(3):
                await client.post(f"{url}/generate", REQUEST)
        calls = [actor.calls for actor in world.actors]
        assert len(cluster.requests) == 6
        await client.post(f"{url}/generate", REQUEST)
        assert [actor.calls for actor in world.actors] == calls  # from here, as without posters
        assert len(cluster.requests) == 7


async def test_a_cancelled_request_ends_in_its_poster_too(world: FakeRay, client: HttpClient) -> None:
    with StandInCluster(1) as cluster:
        cluster.engines[0].delay = 5.0
        url = cluster.engines[0].url
        asked = asyncio.create_task(client.post(f"{url}/generate", {**REQUEST, "rid": "r"}))
        while not cluster.requests:
            await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await client.drain_aborts()
        assert [abort["rid"] for abort in cluster.engines[0].aborts] == ["r"]
