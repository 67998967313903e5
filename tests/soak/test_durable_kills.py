"""Fifty kills of the driver on stand-in engines without trainer: lost 0, trained twice 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.durable_kills import run_with_kills

pytestmark = pytest.mark.soak


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("overlap", "partial"), [(False, False), (False, True), (True, False), (True, True)])
def test_fifty_kills(tmp_path: Path, overlap: bool, partial: bool) -> None:
    kills = 13 if overlap else 12
    back = run_with_kills(
        tmp_path / "run", kills, seed=7, overlap=overlap, partial_rollout=partial, rollout_shuffle=True
    )
    print(f"{kills} kills, overlap {overlap}, partial {partial}: {back} groups came back")
    assert back > 0
