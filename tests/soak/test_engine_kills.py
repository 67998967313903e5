"""The long forms of ``tests/integration/test_engine_kills.py``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slime.ray.manager.engines.served_model import ROUTER_RESTARTS
from tests.support.engine_kills import (
    ENGINE_WORDS,
    kill_engines,
    kill_one_of_two,
    kill_router,
    rollout_client,
    stop_an_engine,
)
from tests.support.standin_fleet import standin_fleet, standin_fleet_with_router
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]
KILLS = int(os.environ.get("SLIME_SOAK_KILLS", "20"))


@pytest.mark.timeout(600)
def test_standins_killed_at_many_random_moments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with (
        standin_fleet(monkeypatch, 4, ENGINE_WORDS, use_fault_tolerance=True) as (standins, router),
        rollout_client(monkeypatch, tmp_path) as make_args,
    ):
        print(kill_engines(standins, router, make_args, kills=KILLS))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("package", ["smg", "sglang_router"])
def test_the_router_killed_at_many_random_moments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str):
    with (
        standin_fleet_with_router(monkeypatch, tmp_path, 3, ENGINE_WORDS, sglang_router_package=package) as standins,
        rollout_client(monkeypatch, tmp_path) as make_args,
    ):
        print(kill_router(standins, make_args, kills=min(KILLS, ROUTER_RESTARTS)))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault_tolerance", [False, True], ids=["waited for", "replaced"])
def test_a_standin_stopped_for_a_minute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault_tolerance: bool):
    with (
        standin_fleet(monkeypatch, 2, ENGINE_WORDS, use_fault_tolerance=fault_tolerance) as (standins, router),
        rollout_client(monkeypatch, tmp_path) as make_args,
    ):
        standins.fleet.resume_checks()
        print(stop_an_engine(standins, router, make_args, seconds=60.0))
        members = standins.fleet.members
        assert members.lost == members.restarted
        assert bool(members.lost) == fault_tolerance


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_of_two_real_engines_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int):
    print(kill_one_of_two(monkeypatch, make_tiny_checkpoint(tmp_path / "model"), tmp_path, seed))
