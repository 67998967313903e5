"""Engines that are killed or stopped while they generate: nothing is lost or counts twice, the others continue."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.requests import engines
from slime.rollout.sglang_rollout import generate_rollout
from slime.servers import http_client
from slime.servers.http_client import HttpTimeoutError
from tests.support.engine_churn import churn_engines
from tests.support.engine_kills import (
    ENGINE_WORDS,
    kill_each_model,
    kill_engines,
    kill_router,
    replace_who_answers_garbage,
    rollout_client,
    stop_an_engine,
)
from tests.support.standin_fleet import standin_fleet, standin_fleet_with_router, standin_models

pytestmark = pytest.mark.integration


def test_standins_killed_at_random_moments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with (
        standin_fleet(monkeypatch, 3, ENGINE_WORDS, use_fault_tolerance=True) as (standins, router),
        rollout_client(monkeypatch, tmp_path) as make_args,
    ):
        print(kill_engines(standins, router, make_args, kills=4))


def test_standins_join_leave_and_die_at_random_moments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with (
        standin_fleet(monkeypatch, 2, ENGINE_WORDS, use_fault_tolerance=True) as (standins, router),
        rollout_client(monkeypatch, tmp_path) as make_args,
    ):
        print(churn_engines(monkeypatch, standins, router, make_args, changes=8))


def test_the_only_engine_of_each_model_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The judge is back without weights and without a push; the actor gets its weights in the middle of a rollout."""
    models = {"actor": ENGINE_WORDS, "judge": ENGINE_WORDS}
    with (
        standin_models(monkeypatch, tmp_path, models, use_fault_tolerance=True) as (standins, routers),
        rollout_client(monkeypatch, tmp_path) as make_args,
    ):
        print(kill_each_model(standins, routers, make_args, ["judge", "actor", "judge", "actor"]))


@pytest.mark.parametrize("fault_tolerance", [False, True], ids=["waited for", "replaced"])
def test_a_standin_stopped_for_a_while(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault_tolerance: bool):
    with (
        standin_fleet(monkeypatch, 2, ENGINE_WORDS, use_fault_tolerance=fault_tolerance) as (standins, router),
        rollout_client(monkeypatch, tmp_path) as make_args,
    ):
        standins.fleet.resume_checks()
        print(stop_an_engine(standins, router, make_args, seconds=5.0))
        members = standins.fleet.members
        assert members.lost == members.restarted
        assert bool(members.lost) == fault_tolerance


def test_a_stopped_standin_is_named_when_the_deadline_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with (
        standin_fleet(monkeypatch, 2, ENGINE_WORDS) as (standins, _),
        rollout_client(monkeypatch, tmp_path) as make_args,
    ):
        monkeypatch.setattr(engines, "PROBE_DEADLINE_S", 1.0)
        monkeypatch.setattr(http_client, "ABORT_DEADLINE_S", 1.0)
        args = make_args(standins.address, prompts=8, rollout_request_timeout=5.0)
        stopped, working = standins.serving()
        stopped.send(signal.SIGSTOP)
        with pytest.raises(HttpTimeoutError, match=r"deadline of 5 s") as caught:
            generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
        notes = " ".join(caught.value.__notes__)
        urls = {member.engine: member.known_info.url for member in standins.fleet.members.all()}
        assert f"engine {urls[stopped]} does not report its load" in notes
        assert f"engine {urls[working]} holds 0 requests" in notes
        assert "while generating group" in notes
        assert standins.fleet.members.lost == 0


def test_the_router_killed_at_random_moments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with (
        standin_fleet_with_router(monkeypatch, tmp_path, 3, ENGINE_WORDS) as standins,
        rollout_client(monkeypatch, tmp_path) as make_args,
    ):
        print(kill_router(standins, make_args, kills=3))


@pytest.mark.parametrize("spoil", ["nan", "short", "old"])
def test_an_engine_that_answers_garbage_behind_a_router_that_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spoil: str
):
    pytest.importorskip("smg")
    first = {1: [*ENGINE_WORDS, "--fault", f"{spoil}=0.5"]}
    with (
        standin_fleet_with_router(
            monkeypatch, tmp_path, 2, ENGINE_WORDS, first_words=first, use_fault_tolerance=True
        ) as standins,
        rollout_client(monkeypatch, tmp_path) as make_args,
    ):
        print(replace_who_answers_garbage(standins, make_args, oldest_version=0))


def test_an_engine_that_answers_garbage_behind_a_router_that_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    first = {1: [*ENGINE_WORDS, "--fault", "nan=1.0"]}
    with (
        standin_fleet(monkeypatch, 2, ENGINE_WORDS, first_words=first, use_fault_tolerance=True) as (standins, _),
        rollout_client(monkeypatch, tmp_path) as make_args,
    ):
        print(replace_who_answers_garbage(standins, make_args))
