"""Engines that join, leave and die at many random moments."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.engine_churn import churn_engines
from tests.support.engine_kills import ENGINE_WORDS, rollout_client
from tests.support.standin_fleet import standin_fleet

pytestmark = [pytest.mark.integration, pytest.mark.soak]
CHANGES = int(os.environ.get("SLIME_SOAK_KILLS", "20")) * 3


@pytest.mark.timeout(600)
def test_standins_join_leave_and_die_at_many_random_moments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with (
        standin_fleet(monkeypatch, 2, ENGINE_WORDS, use_fault_tolerance=True) as (standins, router),
        rollout_client(monkeypatch, tmp_path) as make_args,
    ):
        print(churn_engines(monkeypatch, standins, router, make_args, CHANGES))
