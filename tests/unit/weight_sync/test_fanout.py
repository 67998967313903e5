"""One call to all engines, one deadline for all of them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from slime.servers.engine_client import EngineClient
from slime.utils.structured_error import StructuredError
from slime.weight_sync import fanout, steps
from slime.weight_sync.fanout import FanOut, WeightSyncError, attempt
from tests.support.standin import StandInCluster


def test_the_deadline_is_that_of_all_engines_together() -> None:
    end = threading.Event()
    control = FanOut([SimpleNamespace(url=f"http://e{i}") for i in range(40)])
    began = time.monotonic()
    try:
        with pytest.raises(WeightSyncError, match=r"could not wait on 40 of 40 engines"):
            control.call("wait", lambda client: end.wait(60), deadline_s=0.4)
        assert time.monotonic() - began < 8  # not 40 x 0.4 s
    finally:
        end.set()
        control.close()


def test_an_answer_that_came_in_time_counts_though_it_is_looked_at_late() -> None:
    control = FanOut([SimpleNamespace(url="late"), SimpleNamespace(url="early")])
    end = threading.Event()
    try:
        with pytest.raises(WeightSyncError) as caught:
            control.call("answer", lambda client: client.url == "early" or end.wait(20), deadline_s=0.3)
    finally:
        end.set()
        control.close()
    assert "1 of 2 engines" in str(caught.value)
    assert "early" not in str(caught.value)


def what_a_push_raises_of_an_engine_that_hangs_on(path: str) -> tuple[str, WeightSyncError]:
    """Push to two engines, one of which answers all calls but ``path``; return its URL and the error."""
    with StandInCluster(2) as cluster:
        hangs = cluster.engines[1]
        hangs.hangs_on.add(path)
        clients = [EngineClient(engine.url, timeout=1.5) for engine in cluster.engines]
        control = FanOut(clients)

        def push() -> None:
            steps.health_check(control, 1.5)
            steps.pause_and_flush(control, "abort", 1.5)
            control.call("load it", lambda c: c.update_weights_from_disk("/w", weight_version="3"), 1.5)
            steps.verify_and_continue(control, 3, 1.5)

        with pytest.raises(WeightSyncError) as caught:
            push()
        control.close()
        clients[1].loads(timeout=10.0)  # the server itself continues to answer
        return hangs.url, caught.value


def test_an_engine_that_hangs_in_one_call_of_a_push_is_named() -> None:
    """All calls of a push at once, because each takes its deadline."""
    steps_of_calls = {
        "/health": "reach the server",
        "/pause_generation": "pause (abort)",
        "/flush_cache": "flush the prefix cache",
        "/update_weights_from_disk": "load it",
        "/model_info": "read the weight version",
        "/continue_generation": "continue",
    }
    with ThreadPoolExecutor(len(steps_of_calls)) as pool:
        results = list(pool.map(what_a_push_raises_of_an_engine_that_hangs_on, steps_of_calls))
    for (url, error), step in zip(results, steps_of_calls.values(), strict=True):
        assert error.data == {"hanging": {url: f"could not {step}"}}


def test_the_data_of_every_engine_s_failure_is_that_of_the_step() -> None:
    control = FanOut([SimpleNamespace(url="refuses"), SimpleNamespace(url="dies")])

    def load(client: SimpleNamespace) -> None:
        raise StructuredError("no", {"refused": True}) if client.url == "refuses" else ConnectionError("Broken pipe")

    with pytest.raises(WeightSyncError, match="load on 2 of 2 engines") as caught:
        control.call("load", load, deadline_s=5.0)
    control.close()
    assert caught.value.data == {"refused": True, "peer_lost": True}


@pytest.mark.parametrize("own", [None, WeightSyncError("mine", {"refused": True}), ValueError("mine")])
def test_every_rank_raises_with_the_data_of_all(own: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ("another rank's", {"hanging": {"http://e1": "could not pause"}})
    monkeypatch.setattr(fanout, "gather_from_world", lambda mine: [None, other, mine])

    def step() -> None:
        if own is not None:
            raise own

    with pytest.raises(WeightSyncError) as caught:
        attempt(step)
    assert str(caught.value) == ("mine" if isinstance(own, WeightSyncError) else "another rank's")
    refused = {"refused": True} if isinstance(own, WeightSyncError) else {}
    assert caught.value.data == {**refused, "hanging": {"http://e1": "could not pause"}}


@pytest.mark.parametrize(("words", "secondary"), [("shape mismatch", False), ("connection reset by peer", True)])
def test_a_cause_among_lost_connections_is_not_taken_for_a_consequence(
    words: str, secondary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = ("connection closed by peer", {"peer_lost": True})
    monkeypatch.setattr(fanout, "gather_from_world", lambda mine: [mine, lost])

    def step() -> None:
        raise RuntimeError(words)

    with pytest.raises(WeightSyncError) as caught:
        attempt(step)
    assert caught.value.data.get("peer_lost", False) is secondary
