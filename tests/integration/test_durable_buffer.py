"""Runs are killed at any moment and started again: no prompt is lost or trained twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.durable_kills import run_with_kills


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["default", "overlap", "filter", "fully async", "fan-out"])
def test_kills_at_any_moment(tmp_path: Path, mode: str) -> None:
    """The driver alone, on stand-in engines without trainer."""
    run_with_kills(tmp_path / "run", 2, seed=len(mode), mode=mode)
