"""Runs are killed at any moment and started again: no prompt is lost or trained twice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.durable_kills import MODES, random_plan, run_with_kills
from tests.support.loop_kills import LoopKills


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["default", "filter", "fully async"])
def test_kills_at_any_moment(tmp_path: Path, mode: str) -> None:
    """The driver alone, on stand-in engines without trainer."""
    seed = list(MODES).index(mode)
    run_with_kills(tmp_path / "run", random_plan(seed, 2), seed, mode)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_whole_run_is_killed_while_it_saves(tmp_path: Path) -> None:
    """Ray, engines and trainer: an epoch in three rollouts."""
    run = LoopKills(tmp_path, 3)
    run.kill_in("save", random.Random(0))
    run.finish()
    run.check()
