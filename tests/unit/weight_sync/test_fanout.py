"""One call to all engines, one deadline for all of them."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from slime.weight_sync.fanout import FanOut, WeightSyncError


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
