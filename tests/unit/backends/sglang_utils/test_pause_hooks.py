"""Requests that have ended do not keep a scheduler from flushing its cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engine_plugin import engine_plugin


@dataclass
class Request:
    ended: bool

    def finished(self) -> bool:
        return self.ended


@dataclass
class Batch:
    reqs: list[Request] = field(default_factory=list)
    batch_is_full: bool = True

    def filter_batch(self) -> None:
        self.reqs = [request for request in self.reqs if not request.finished()]


class Scheduler:
    """As SGLang's: idle without a batch that holds requests."""

    disaggregation_mode = "null"
    _engine_paused = False

    def __init__(self, running: list[bool], last: list[bool] | None, overlap: bool) -> None:
        self.waiting_queue: list[Any] = []
        self.running_batch = Batch([Request(ended) for ended in running])
        self.last_batch = None if last is None else Batch([Request(ended) for ended in last])
        self.enable_overlap = overlap

    def flush_cache(self) -> bool:
        return not self.running_batch.reqs and not (self.last_batch and self.last_batch.reqs)


@pytest.fixture
def pause() -> Iterator[Any]:
    """The hooks, without SGLang."""
    with engine_plugin({"disaggregation.utils": {"DisaggregationMode": SimpleNamespace(NULL="null")}}) as load:
        yield load("server.pause")


@pytest.mark.parametrize(
    ("running", "last", "overlap", "flushes"),
    [
        ([], None, False, True),
        ([], [True, True], False, True),  # a prefill that ended its requests
        ([True], None, False, True),
        ([True], [True], False, True),
        ([], [True, False], False, False),
        ([True, False], None, False, False),
        ([False], [True], False, False),
        ([], [True], True, False),  # it may run meanwhile
    ],
)
def test_requests_that_have_ended_do_not_keep_the_cache(
    pause: Any, running: list[bool], last: list[bool] | None, overlap: bool, flushes: bool
) -> None:
    scheduler = Scheduler(running, last, overlap)
    assert pause.flush_with_waiting_requests(Scheduler.flush_cache, scheduler) is flushes
    kept = [request for batch in (scheduler.running_batch, scheduler.last_batch) if batch for request in batch.reqs]
    if flushes:
        assert kept == []
        assert scheduler.running_batch.batch_is_full == (not running and not last)
    else:
        whole = [running, last or []]
        assert len(kept) == sum(len(batch) for batch in whole if overlap or not all(batch))
