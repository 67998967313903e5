"""Changed requests to every endpoint of gateway and buffer: answered or refused, and never an error of the server."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter

import pytest

from tests.support.hostile_requests import BODIES, Hostile, doors, hostile

pytestmark = pytest.mark.slow


def attack(caplog: pytest.LogCaptureFixture, count: int, seed: int) -> Counter[int]:
    """Send ``count`` requests; return how many had each status."""
    rng, statuses = random.Random(seed), Counter[int]()
    with caplog.at_level(logging.WARNING), doors() as at:
        for path in BODIES:  # unchanged they are right, or the changes would show nothing
            assert at.send(Hostile(path, json.dumps(BODIES[path]).encode())) == 200, path
        for number in range(count):
            one = hostile(rng)
            status = at.send(one)
            statuses[status] += 1
            seen = (number, one.path, one.headers, one.body[:600], status)
            assert status == 200 or 400 <= status < 500, seen
            assert status != 200 or not one.is_wrong, seen
        assert at.gateway.inflight._turns == {}
        assert len(at.gateway.store) < 300
        for engine in at.cluster.engines:
            assert not engine.running
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
    assert [record for record in errors if "is lost: POST" not in record.getMessage()] == []
    assert len(caplog.records) < 2000
    return statuses


def test_a_thousand_changed_requests(caplog):
    statuses = attack(caplog, 1000, seed=1)
    assert statuses[400] > 300


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 22))
def test_a_thousand_others(caplog, seed):
    assert attack(caplog, 1000, seed)[400] > 300
