"""Requests of the engine client, and its handling of replies, failures and silence."""

from __future__ import annotations

import threading
import time
from itertools import chain, repeat
from typing import Any

import pytest

from slime.servers.engine_client import EngineClient
from slime.servers.http import EngineError, EngineTimeoutError
from slime.servers.loads import num_requests_from_load, num_waiting_from_load
from tests.support.http_stub import Reply, Seen, http_stub

OK: Reply = (200, {"success": True, "message": "Success."})


@pytest.mark.parametrize(
    ("call", "method", "path", "body"),
    [
        (lambda c: c.pause(), "POST", "/pause_generation", {"mode": "abort"}),
        (lambda c: c.pause("retract"), "POST", "/pause_generation", {"mode": "retract"}),
        (lambda c: c.resume(), "POST", "/continue_generation", {}),
        (lambda c: c.flush_cache(), "POST", "/flush_cache", {}),
        (lambda c: c.abort_all(), "POST", "/abort_request", {"abort_all": True}),
        (lambda c: c.abort("r1"), "POST", "/abort_request", {"rid": "r1"}),
        (lambda c: c.health(), "GET", "/health", None),
        (lambda c: c.health_generate(), "GET", "/health_generate", None),
        (lambda c: c.loads(), "GET", "/v1/loads?include=core", None),
        (lambda c: c.resume_memory(["weights"]), "POST", "/resume_memory_occupation", {"tags": ["weights"]}),
        (lambda c: c.resume_memory(), "POST", "/resume_memory_occupation", {}),
        (lambda c: c.weights_checker("compare"), "POST", "/weights_checker", {"action": "compare"}),
        (
            lambda c: c.init_weights_update_group(
                master_address="h", master_port=5, rank_offset=1, world_size=3, group_name="slime-pp_0", backend="gloo"
            ),
            "POST",
            "/init_weights_update_group",
            {
                "master_address": "h",
                "master_port": 5,
                "rank_offset": 1,
                "world_size": 3,
                "group_name": "slime-pp_0",
                "backend": "gloo",
            },
        ),
        (
            lambda c: c.destroy_weights_update_group(group_name="slime-pp_0"),
            "POST",
            "/destroy_weights_update_group",
            {"group_name": "slime-pp_0"},
        ),
        (
            lambda c: c.update_weights_from_distributed(
                names=("a",), dtypes=["bfloat16"], shapes=[(2, 3)], group_name="g", weight_version="7"
            ),
            "POST",
            "/update_weights_from_distributed",
            {
                "names": ["a"],
                "dtypes": ["bfloat16"],
                "shapes": [[2, 3]],
                "group_name": "g",
                "flush_cache": False,
                "weight_version": "7",
            },
        ),
        (
            lambda c: c.update_weights_from_tensor(serialized_named_tensors=["x"], load_format="flattened_bucket"),
            "POST",
            "/update_weights_from_tensor",
            {"serialized_named_tensors": ["x"], "load_format": "flattened_bucket", "flush_cache": False},
        ),
        (
            lambda c: c.update_weights_from_disk("/m", weight_version="3"),
            "POST",
            "/update_weights_from_disk",
            {"model_path": "/m", "flush_cache": True, "weight_version": "3"},
        ),
    ],
)
def test_requests_as_sglang_expects_them(call: Any, method: str, path: str, body: Any) -> None:
    with http_stub(lambda seen: OK) as stub:
        call(EngineClient(stub.url + "/"))
    assert stub.seen == [Seen(method, path, body, None)]


def test_release_memory_flushes_first() -> None:
    with http_stub(lambda seen: OK) as stub:
        EngineClient(stub.url).release_memory()
    assert [s.path for s in stub.seen] == ["/flush_cache", "/release_memory_occupation"]


def test_the_key_is_sent_as_a_bearer_token() -> None:
    with http_stub(lambda seen: (200, {"weight_version": "12"})) as stub:
        assert EngineClient(stub.url, api_key="s3cret").weight_version() == "12"
    assert stub.seen[0].authorization == "Bearer s3cret"


def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with http_stub(lambda seen: OK) as stub:
        EngineClient(stub.url).resume()


def test_a_refusal_carries_the_replys_text_and_is_not_repeated() -> None:
    with http_stub(lambda seen: (400, {"message": "tensor size mismatch for norm"})) as stub:
        with pytest.raises(EngineError, match=r"answered 400.*tensor size mismatch for norm") as caught:
            EngineClient(stub.url).pause()
    assert (caught.value.status, caught.value.method) == (400, "POST")
    assert caught.value.url == f"{stub.url}/pause_generation"
    assert len(stub.seen) == 1


def test_success_false_with_status_200_is_an_error_too() -> None:
    with http_stub(lambda seen: (200, {"success": False, "message": "no such group"})) as stub:
        with pytest.raises(EngineError, match="no such group"):
            EngineClient(stub.url).destroy_weights_update_group(group_name="g")


def test_a_silent_engine_ends_at_the_deadline() -> None:
    released = threading.Event()

    def silent(seen: Seen) -> Reply:
        released.wait(60)
        return OK

    with http_stub(silent) as stub:
        started = time.monotonic()
        try:
            with pytest.raises(EngineTimeoutError, match=r"none within 0\.2 s"):
                EngineClient(stub.url, timeout=0.2).pause()
        finally:
            released.set()
        assert time.monotonic() - started < 30


def test_a_dead_engine_is_named() -> None:
    with http_stub(lambda seen: OK) as stub:
        url = stub.url
    client = EngineClient(url)
    with pytest.raises(EngineError, match=f"{url}/abort_request.*no reply") as caught:
        client.abort_all()
    assert caught.value.status is None
    assert not client.is_healthy()


def test_flush_waits_while_the_engine_is_busy() -> None:
    replies = chain([(400, "Flush cache failed."), (400, "Flush cache failed.")], repeat((200, "Cache flushed.")))
    with http_stub(lambda seen: next(replies)) as stub:
        EngineClient(stub.url).flush_cache(10)
    assert len(stub.seen) == 3


def test_flush_gives_up_at_its_deadline() -> None:
    with http_stub(lambda seen: (400, "Flush cache failed.")) as stub:
        with pytest.raises(EngineTimeoutError, match=r"Flush cache failed\. \(for 0\.3 s\).*still running"):
            EngineClient(stub.url).flush_cache(0.3)


def test_flush_does_not_retry_other_failures() -> None:
    with http_stub(lambda seen: (401, "Unauthorized")) as stub:
        with pytest.raises(EngineError, match="Unauthorized"):
            EngineClient(stub.url).flush_cache(10)
    assert len(stub.seen) == 1


def test_checksum_is_the_whole_engines() -> None:
    reply = {"success": True, "ranks": [{"per_gpu_checksum": "aa"}], "per_engine_checksum": "bb"}
    with http_stub(lambda seen: (200, reply)) as stub:
        assert EngineClient(stub.url).weights_checksum() == "bb"
    assert stub.seen[0].body == {"action": "checksum"}


@pytest.mark.parametrize(
    ("load", "count", "waiting"),
    [
        ({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 3}, {"num_running_reqs": 1}]}, 6, 3),
        ([{"num_reqs": 4, "num_waiting_reqs": 1}, {"num_total_reqs": 5, "total_waiting_reqs": 2}], 9, 3),
        ({"total_reqs": 7, "num_running_reqs": 1}, 7, 0),
        ({"num_reqs": None, "total_running_reqs": 2, "total_waiting_reqs": 2}, 4, 2),
        ({"num_reqs": True, "num_running_reqs": 3}, 3, 0),
        ({"loads": []}, 0, 0),
        ({}, 0, 0),
    ],
)
def test_requests_are_counted_from_any_form_of_load_reply(load: Any, count: int, waiting: int) -> None:
    assert (num_requests_from_load(load), num_waiting_from_load(load)) == (count, waiting)


@pytest.mark.parametrize("read", [num_requests_from_load, num_waiting_from_load])
def test_a_load_reply_of_another_kind_is_refused(read: Any) -> None:
    with pytest.raises(ValueError, match="got str"):
        read("busy")


def test_num_requests_asks_the_engine() -> None:
    with http_stub(lambda seen: (200, {"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}]})) as stub:
        assert EngineClient(stub.url).num_requests() == 3
