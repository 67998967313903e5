"""A flood of warnings is counted, not logged."""

from __future__ import annotations

import logging

from slime.utils import bounded_log
from slime.utils.bounded_log import BoundedLog


def test_a_flood_is_counted_and_later_warnings_are_logged_again(caplog, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(bounded_log.time, "monotonic", lambda: now[0])
    told = BoundedLog(logging.getLogger("slime.test"))
    for number in range(1000):
        told.tell("refused: %s", number)
    assert [record.getMessage() for record in caplog.records] == [f"refused: {number}" for number in range(50)]
    now[0] += bounded_log.PERIOD_S
    told.tell("100 %")
    assert [record.getMessage() for record in caplog.records[50:]] == [
        "950 more messages like the last ones were left out",
        "100 %",
    ]


def test_a_message_is_cut(caplog):
    BoundedLog(logging.getLogger("slime.test")).tell("%s", "x" * 100_000)
    [record] = caplog.records
    assert record.getMessage() == "x" * 500 + "... (100000 characters)"
