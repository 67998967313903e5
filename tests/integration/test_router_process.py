"""Routers that fail, collide and stop. Their work with an engine: ``test_engine_control.py``."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from slime.backends.sglang_utils import router as router_module
from slime.backends.sglang_utils.errors import RouterStartError
from slime.backends.sglang_utils.ports import reserve_ports
from slime.backends.sglang_utils.router import RouterProcess, list_workers
from slime.rollout.requests.generate_request import generate_payload
from slime.rollout.requests.generate_state import train_sampling_params
from slime.servers.http_client import HttpClient
from slime.servers.http_replies import engine_of
from slime.servers.types import EngineInfo
from slime.utils.types import Sample
from tests.support.engines import engine_args
from tests.support.rollout_args import rollout_args
from tests.support.standin.cluster import StandInCluster

pytestmark = pytest.mark.integration


def test_a_router_that_cannot_start_says_why(tmp_path: Path) -> None:
    args = engine_args("none", router_backend="no_such_backend")
    router = RouterProcess(args, "127.0.0.1", log_path=tmp_path / "router.log")
    router.start()
    with pytest.raises(RouterStartError, match=r"(?s)router .* exited with code.*Last lines of.*no_such_backend"):
        router.wait_ready(60)
    assert router.poll() is not None


def test_a_router_whose_port_is_taken_starts_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``smg``, for a policy that only it has."""
    pytest.importorskip("smg")
    args = engine_args("none", router_policy="prefix_hash")
    with socket.create_server(("127.0.0.1", reserve_ports(1)[0])) as squatter:
        taken = squatter.getsockname()[1]
        choices = iter([[taken]])
        monkeypatch.setattr(router_module, "reserve_ports", lambda n: next(choices, None) or reserve_ports(n))
        router = RouterProcess(args, "127.0.0.1", log_path=tmp_path / "router.log")
        try:
            assert router.package == "smg"
            router.start()
            router.wait_ready(60)
            assert router.port != taken
            assert router.poll() is None
        finally:
            router.stop()
    assert router.poll() is not None


@pytest.mark.parametrize("package", ["smg", "sglang_router"])
@pytest.mark.parametrize("policy", ["manual", "consistent_hashing"])
def test_requests_with_one_routing_key_go_to_one_engine(tmp_path: Path, policy: str, package: str) -> None:
    pytest.importorskip(package)
    keys = [f"{random.Random(number).getrandbits(128):032x}" for number in range(64)]
    args = engine_args("none", router_policy=policy, sglang_router_package=package)
    router = RouterProcess(args, "127.0.0.1", log_path=tmp_path / "router.log")
    assert router.package == package
    with StandInCluster(2) as cluster, requests.Session() as client:
        try:
            router.start()
            router.wait_ready(60)
            for engine in cluster.engines:
                router.add_engine(EngineInfo(engine.url))
            for turn in range(2):
                for key in keys:
                    body = {"input_ids": list(range(turn + 1)), "sampling_params": {"max_new_tokens": 1}}
                    headers = {"X-SMG-Routing-Key": key}
                    client.post(f"{router.url}/generate", json=body, headers=headers, timeout=60).raise_for_status()
        finally:
            router.stop()
    asked = [[_routing_key(headers) for headers in engine.headers] for engine in cluster.engines]
    assert sorted(asked[0] + asked[1]) == sorted(keys * 2)
    assert all(asked), "one engine got everything: the policy does not spread"
    assert not set(asked[0]) & set(asked[1])


def test_sessions_stay_where_they_are_when_an_engine_leaves_smg(tmp_path: Path) -> None:
    pytest.importorskip("smg")
    args = engine_args("none", router_policy="consistent_hashing", sglang_router_package="smg")
    router = RouterProcess(args, "127.0.0.1", log_path=tmp_path / "router.log")
    keys = [f"session-{number}" for number in range(48)]
    with StandInCluster(3) as cluster, requests.Session() as client:
        infos = [EngineInfo(engine.url) for engine in cluster.engines]

        def ask() -> None:
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
            for key in keys:
                headers = {"X-SMG-Routing-Key": key}
                client.post(f"{router.url}/generate", json=body, headers=headers, timeout=60).raise_for_status()

        try:
            router.start()
            router.wait_ready(60)
            for info in infos:
                router.add_engine(info)
            ask()
            before = [{_routing_key(headers) for headers in engine.headers} for engine in cluster.engines]
            assert router.remove_engine(infos[0])
            wait_until(lambda: len(list_workers(router.url)) == 2)
            ask()
        finally:
            router.stop()
    after = [{_routing_key(headers) for headers in engine.headers} for engine in cluster.engines]
    assert all(before)
    assert after[0] == before[0]
    # Those of the engine that left went to the others, and no other moved.
    assert not (after[1] - before[1]) - before[0]
    assert not (after[2] - before[2]) - before[0]
    assert before[0] <= after[1] | after[2]


def _routing_key(headers: dict[str, str]) -> str:
    return {name.lower(): value for name, value in headers.items()}["x-smg-routing-key"]


def test_every_data_parallel_rank_is_a_destination(tmp_path: Path) -> None:
    pytest.importorskip("smg")
    args = engine_args("none", router_dp_aware=True, router_policy="round_robin")
    router = RouterProcess(args, "127.0.0.1", log_path=tmp_path / "router.log")
    with StandInCluster(2, dp_size=3) as cluster, requests.Session() as client:
        infos = [EngineInfo(engine.url) for engine in cluster.engines]
        try:
            router.start()
            router.wait_ready(60)
            for info in infos:
                router.add_engine(info)

            def ask(times: int) -> None:
                body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
                for _ in range(times):
                    client.post(f"{router.url}/generate", json=body, timeout=60).raise_for_status()

            ask(12)
            for engine in cluster.engines:
                assert Counter(request["data_parallel_rank"] for request in engine.requests) == {0: 2, 1: 2, 2: 2}
            assert router.remove_engine(infos[0])
            wait_until(lambda: {engine_of(w["url"]) for w in list_workers(router.url)} == {infos[1].url})
            ask(6)
        finally:
            router.stop()
    assert [len(engine.requests) for engine in cluster.engines] == [6, 12]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_all_engines_get_requests_of_a_short_rollout(tmp_path: Path) -> None:
    """Requests that begin alike and come at once, to engines that the router has known for two seconds."""
    pytest.importorskip("smg")
    router = RouterProcess(engine_args("none", router_policy="cache_aware"), "127.0.0.1", log_path=tmp_path / "log")
    with StandInCluster(2, duration=lambda ids: 0.4) as cluster:

        async def rollout() -> None:
            client = HttpClient(32, request_timeout=60.0)
            bodies = [{"input_ids": [1, 2, 3, 4, n], "sampling_params": {"max_new_tokens": 1}} for n in range(32)]
            await asyncio.gather(*(client.post(f"{router.url}/generate", body) for body in bodies))
            await client.close()

        try:
            router.start()
            router.wait_ready(60)
            for engine in cluster.engines:
                router.add_engine(EngineInfo(engine.url))
            time.sleep(2)
            asyncio.run(rollout())
        finally:
            router.stop()
    shares = [len(engine.requests) for engine in cluster.engines]
    assert sum(shares) == 32
    assert min(shares) >= 12, shares


@pytest.mark.parametrize("package", ["smg", "sglang_router"])
def test_what_engines_are_asked_for_gets_through(tmp_path: Path, package: str) -> None:
    """Labels do; sglang-router drops fields that it does not know, which is why the engine plugin reads labels."""
    pytest.importorskip(package)
    args = engine_args("none", sglang_router_package=package)
    router = RouterProcess(args, "127.0.0.1", log_path=tmp_path / "router.log")
    args = rollout_args(rollout_top_p=0.9, use_rollout_routing_replay=True)
    payload = generate_payload(args, Sample(tokens=[1, 2]), train_sampling_params(args), evaluation=False)
    assert payload is not None
    with StandInCluster(1) as cluster, requests.Session() as client:
        try:
            router.start()
            router.wait_ready(60)
            router.add_engine(EngineInfo(cluster.engines[0].url))
            client.post(f"{router.url}/generate", json=payload, timeout=60).raise_for_status()
        finally:
            router.stop()
        asked = cluster.requests[-1]
    assert asked["custom_labels"] == payload["custom_labels"]
    fields = {"return_sampling_mask", "return_routed_experts"}
    assert fields & asked.keys() == (fields if package == "smg" else set())


def test_an_engine_that_leaves_smg_may_rejoin_at_once(tmp_path: Path) -> None:
    """It removes engines in the background, and refuses a URL that it still has."""
    pytest.importorskip("smg")
    client = HttpClient(4, request_timeout=60.0)
    router = RouterProcess(
        engine_args("none", sglang_router_package="smg"), "127.0.0.1", log_path=tmp_path / "router.log"
    )
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    with StandInCluster(1) as cluster:
        info = EngineInfo(cluster.engines[0].url)

        async def asked_before_there_is_an_engine() -> None:
            asking = asyncio.create_task(client.post(f"{router.url}/generate", body, max_retries=1))
            await asyncio.sleep(0.5)
            assert not asking.done()
            await asyncio.to_thread(router.add_engine, info)
            await asking
            await client.close()

        try:
            router.start()
            router.wait_ready(60)
            asyncio.run(asked_before_there_is_an_engine())
            for _ in range(3):
                assert router.remove_engine(info)
                router.add_engine(info)
        finally:
            router.stop()
