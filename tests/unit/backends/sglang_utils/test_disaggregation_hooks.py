"""A prefill or decode engine on a CPU that waits for another one's caches leaves it the cores."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.engine_plugin import engine_plugin


@pytest.mark.parametrize(
    ("sleeps_on_idle", "has_requests", "polled"), [(True, True, 1), (True, False, 0), (False, True, 0)]
)
def test_it_polls_with_a_pause_while_requests_wait(sleeps_on_idle: bool, has_requests: bool, polled: int) -> None:
    timeouts: list[int] = []
    sleeper = SimpleNamespace(poller=SimpleNamespace(poll=timeouts.append)) if sleeps_on_idle else None
    with engine_plugin() as load:
        hooks = load("cpu.disaggregation")
        hooks.wait_for_caches(None, SimpleNamespace(idle_sleeper=sleeper, is_fully_idle=lambda: not has_requests))
    assert timeouts == [hooks.POLL_MS] * polled
