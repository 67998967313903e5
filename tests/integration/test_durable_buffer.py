"""The driver is killed at random moments, on stand-in engines without trainer: no prompt is lost or trained twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.durable_kills import run_with_kills


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("overlap", "partial"), [(False, False), (True, True)])
def test_kills_at_random_moments(tmp_path: Path, overlap: bool, partial: bool) -> None:
    run_with_kills(tmp_path / "run", 3, seed=overlap, overlap=overlap, partial_rollout=partial)
