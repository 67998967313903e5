"""Kills of the driver on stand-in engines without trainer, by the dozen: lost 0, trained twice 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.durable_kills import MODES, every_point, random_plan, run_with_kills
from tests.support.durable_points import POINTS

pytestmark = pytest.mark.soak


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", list(MODES))
def test_kills_at_every_moment(tmp_path: Path, mode: str) -> None:
    seed = list(MODES).index(mode)
    found = run_with_kills(tmp_path / "run", random_plan(seed, 16), seed, mode)
    print(f"{mode}: {found}")
    assert found.resumed > 0
    assert found.continued > 0 or "partial" not in mode


@pytest.mark.timeout(3600)
def test_kills_at_every_point(tmp_path: Path) -> None:
    found = run_with_kills(tmp_path / "run", every_point(), 0, "default", patience_s=60.0)
    assert set(found.moments) == set(POINTS)
