"""Engines are compared with the trainer after the first push."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest

from slime.arguments.placement import EnginePlan
from slime.ray.manager.engines import canary
from slime.ray.manager.engines.members import Member, Members, State
from slime.ray.manager.engines.served_model import ServedModel
from slime.servers.types import EngineInfo
from tests.support.http_stub import Reply, Seen, http_stub

EXPECTED = [-0.5, -1.0, -1.5]


def limits(alarm: float = 0.1, stop: float | None = None) -> Any:
    return SimpleNamespace(mismatch_alarm_threshold=alarm, mismatch_stop_threshold=stop, sglang_api_key="k")


def test_what_is_rounding_is_only_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        canary.compare(limits(), EXPECTED, {"engine 0": EXPECTED, "engine 1": [-0.5, -1.03, -1.5]})
    assert caplog.messages == [
        "after the first push, log-probs of a fixed prompt differ between trainer and engines by 0.01 on average "
        "(engine 1)"
    ]
    canary.compare(limits(), EXPECTED, {})
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("values", [[-0.5, -1.0, -4.5], [-0.5, math.nan, -1.5]])
def test_an_engine_that_computes_something_else(caplog: pytest.LogCaptureFixture, values: list[float]) -> None:
    found = {"engine 0": EXPECTED, "engine 1": values}
    canary.compare(limits(), EXPECTED, found)
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "(engine 1), more than --mismatch-alarm-threshold 0.1: engine 0 0, engine 1 " in warning.message
    with pytest.raises(canary.CanaryError, match=r"\(engine 1\), more than --mismatch-stop-threshold 0\.9"):
        canary.compare(limits(stop=0.9), EXPECTED, found)
    caplog.clear()
    canary.compare(limits(alarm=0.0), EXPECTED, found)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def answer(seen: Seen) -> Reply:
    assert seen.path == "/generate"
    assert seen.body["return_logprob"] is True
    assert seen.body["logprob_start_len"] == 0
    values = [None, *(-i / 2 for i in range(1, len(seen.body["input_ids"])))]
    values[3] = None  # NaN, in JSON
    return 200, {"meta_info": {"input_token_logprobs": [[value, 7, None] for value in values]}}


def served(members: Members, name: str, kinds: list[str], url: str, *, updates: bool) -> ServedModel:
    first = len(members.all())
    plans = [EnginePlan(first + i, i, 1, 1, 1, kind, model=name) for i, kind in enumerate(kinds)]
    for plan in plans:
        member = Member(SimpleNamespace(plan=plan))  # type: ignore[arg-type]
        members.put(member)
        members.started(member, EngineInfo(url, rank=plan.rank, api_key="k"), State.SERVING)
    model = ServedModel(name, plans, members, update_weights=updates)
    model.router = SimpleNamespace(url=url)  # type: ignore[assignment]
    return model


def test_who_is_asked() -> None:
    """Every engine that gets weights; prefill and decode engines together, through the router."""
    members = Members()
    with http_stub(answer) as stub, http_stub(lambda seen: (500, "no")) as broken:
        actor = served(members, "actor", ["regular", "regular"], stub.url, updates=True)
        judge = served(members, "judge", ["regular"], broken.url, updates=False)
        found = canary.ask(limits(), [actor, judge])
        assert len(found) == 2
        for values in found.values():
            assert len(values) == len(canary.TOKENS) - 1
            assert values[:2] == [-0.5, -1.0]
            assert math.isnan(values[2])
        assert all(seen.authorization == "Bearer k" for seen in stub.seen)
        pair = served(members, "pair", ["prefill", "decode"], stub.url, updates=True)
        assert list(canary.ask(limits(), [pair])) == ["the engines of model pair"]
        assert len(stub.seen) == 3
        assert not broken.seen
        assert canary.ask(limits(), [served(members, "other", ["regular"], broken.url, updates=True)]) == {}
