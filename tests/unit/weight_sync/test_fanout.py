"""One call to all engines, one deadline for all of them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from slime.servers.engine_client import EngineClient
from slime.weight_sync import steps
from slime.weight_sync.fanout import FanOut, WeightSyncError, engines_that_hang
from tests.support.standin import StandInCluster


def test_the_deadline_is_that_of_all_engines_together() -> None:
    end = threading.Event()
    fanout = FanOut([SimpleNamespace(url=f"http://e{i}") for i in range(40)])
    began = time.monotonic()
    try:
        with pytest.raises(WeightSyncError, match=r"could not wait on 40 of 40 engines"):
            fanout.call("wait", lambda client: end.wait(60), deadline_s=0.4)
        assert time.monotonic() - began < 8  # not 40 x 0.4 s
    finally:
        end.set()
        fanout.close()


def test_an_answer_that_came_in_time_counts_though_it_is_looked_at_late() -> None:
    fanout = FanOut([SimpleNamespace(url="late"), SimpleNamespace(url="early")])
    end = threading.Event()
    try:
        with pytest.raises(WeightSyncError) as caught:
            fanout.call("answer", lambda client: client.url == "early" or end.wait(20), deadline_s=0.3)
    finally:
        end.set()
        fanout.close()
    assert "1 of 2 engines" in str(caught.value)
    assert "early" not in str(caught.value)


def said_of_an_engine_that_hangs_on(path: str) -> tuple[str, str]:
    """Push to two engines, one of which answers all calls but ``path``; return its URL and the error's text."""
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
        clients[1].loads(timeout=10.0)  # the server itself goes on answering
        return hangs.url, str(caught.value)


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
        results = list(pool.map(said_of_an_engine_that_hangs_on, steps_of_calls))
    for (url, text), step in zip(results, steps_of_calls.values(), strict=True):
        assert engines_that_hang(f"rank 0 failed\n{text}") == {url: f"could not {step}"}
