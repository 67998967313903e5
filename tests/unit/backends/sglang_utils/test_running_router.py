"""A router that somebody else runs (``--sglang-router-ip``)."""

from __future__ import annotations

import pytest

from slime.backends.sglang_utils.errors import RouterStartError
from slime.backends.sglang_utils.router import RunningRouter
from slime.servers.types import EngineInfo
from tests.support.arguments import run_args
from tests.support.http_stub import Reply, Seen, http_stub

ENGINE = EngineInfo(url="http://127.0.0.1:15000", num_gpus=1, gpu_offset=0, worker_type="regular", rank=0)


def router_at(url: str) -> RunningRouter:
    host, port = url.removeprefix("http://").split(":")
    return RunningRouter(run_args(sglang_router_ip=host, sglang_router_port=int(port)))


def test_engines_are_added_and_taken_off_again_and_the_router_stays() -> None:
    listed: list[str] = []

    def answer(seen: Seen) -> Reply:
        if seen.method == "POST":
            listed.append(seen.body["url"])
        if seen.method == "DELETE":
            listed.clear()
        return 200, {"workers": [{"id": "w0", "url": url, "is_healthy": True} for url in listed]}

    with http_stub(answer) as stub:
        router = router_at(stub.url)
        assert router.url == stub.url
        router.start()
        router.wait_ready()
        router.add_engine(ENGINE)
        assert listed == [ENGINE.url]
        assert router.poll() is None
        router.stop()
        assert listed == []
        router.stop()
    assert [s.path for s in stub.seen if s.method == "DELETE"] == ["/workers/w0"]


def test_an_address_where_no_router_answers_is_named() -> None:
    with http_stub(lambda seen: (200, {"workers": []})) as stub:
        router = router_at(stub.url)
    with pytest.raises(RouterStartError, match=rf"no router answers at {stub.url} \(--sglang-router-ip"):
        router.wait_ready()


def test_the_end_of_a_run_does_not_fail_when_the_router_has_gone(caplog: pytest.LogCaptureFixture) -> None:
    with http_stub(lambda seen: (200, {"workers": [{"id": "w", "url": ENGINE.url, "is_healthy": True}]})) as stub:
        router = router_at(stub.url)
        router.add_engine(ENGINE)
    router.stop()
    assert f"engine {ENGINE.url} stays on the router" in caplog.text
