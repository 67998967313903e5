"""Registering engines with a router."""

from __future__ import annotations

from typing import Any

import pytest

from slime.backends.sglang_utils import router
from slime.servers.http import RouterError, RouterTimeoutError
from tests.support.http_stub import Reply, Seen, http_stub

ENGINE = "http://127.0.0.1:15000"


def workers(*entries: dict[str, Any]) -> Reply:
    return 200, {"workers": [{"id": f"id-{i}", **entry} for i, entry in enumerate(entries)]}


def test_add_worker_sends_url_type_and_both_keys() -> None:
    with http_stub(lambda seen: (202, {})) as stub:
        router.add_worker(stub.url, ENGINE, engine_api_key="e", api_key="k")
        router.add_worker(stub.url, ENGINE, api_key="k")
    assert stub.seen == [
        Seen("POST", "/workers", {"url": ENGINE, "worker_type": "regular", "api_key": "e"}, "Bearer k"),
        Seen("POST", "/workers", {"url": ENGINE, "worker_type": "regular"}, "Bearer k"),
    ]


def test_prefill_workers_need_their_bootstrap_port() -> None:
    with http_stub(lambda seen: (202, {})) as stub:
        with pytest.raises(ValueError, match="bootstrap port"):
            router.add_worker(stub.url, ENGINE, worker_type="prefill")
        router.add_worker(stub.url, ENGINE, worker_type="prefill", bootstrap_port=8998)
    assert [s.body for s in stub.seen] == [{"url": ENGINE, "worker_type": "prefill", "bootstrap_port": 8998}]


def test_waiting_ends_when_the_router_lists_the_engine_as_healthy() -> None:
    states = iter(
        [workers(), workers({"url": ENGINE, "is_healthy": False}), workers({"url": ENGINE + "/", "is_healthy": True})]
    )
    with http_stub(lambda seen: next(states)) as stub:
        (worker,) = router.wait_worker_ready(stub.url, ENGINE, deadline_s=10)
    assert worker["is_healthy"]
    assert len(stub.seen) == 3


def test_an_engine_is_ready_with_all_its_data_parallel_ranks_and_leaves_with_them() -> None:
    ranks = [{"url": f"{ENGINE}@{rank}", "is_healthy": True, "dp_size": 2} for rank in range(2)]
    other = {"url": "http://127.0.0.1:15002@0", "is_healthy": True, "dp_size": 2}
    listed = iter([workers(other, ranks[0]), workers(other, *ranks), workers(other, *ranks)])
    with http_stub(lambda seen: next(listed) if seen.method == "GET" else (202, {})) as stub:
        assert len(router.wait_worker_ready(stub.url, ENGINE, deadline_s=10)) == 2
        assert router.remove_worker(stub.url, ENGINE)
    assert [s.path for s in stub.seen if s.method == "DELETE"] == ["/workers/id-1", "/workers/id-2"]


def test_waiting_has_a_deadline_and_shows_what_the_router_says() -> None:
    with http_stub(lambda seen: workers({"url": ENGINE, "is_healthy": False})) as stub:
        with pytest.raises(RouterTimeoutError, match=r"is_healthy': False.*after 0\.3 s"):
            router.wait_worker_ready(stub.url, ENGINE, deadline_s=0.3)


def test_removal_goes_by_the_id_of_that_engine() -> None:
    def answer(seen: Seen) -> Reply:
        if seen.method == "GET":
            return workers({"url": "http://127.0.0.1:15002"}, {"url": ENGINE})
        return 202, {}

    with http_stub(answer) as stub:
        assert router.remove_worker(stub.url, ENGINE)
        assert not router.remove_worker(stub.url, "http://127.0.0.1:1")
    assert [(s.method, s.path) for s in stub.seen] == [
        ("GET", "/workers"),
        ("DELETE", "/workers/id-1"),
        ("GET", "/workers"),
    ]


def test_a_refusal_carries_the_routers_text() -> None:
    with http_stub(lambda seen: (500, "no room")) as stub:
        with pytest.raises(RouterError, match="the router answered 500: no room"):
            router.list_workers(stub.url)
