"""The driver is killed at random moments, on stand-in engines without trainer: no prompt is lost or trained twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.durable_kills import FULLY_ASYNC, run_with_kills


@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", [{}, {"overlap": True, "partial_rollout": True}, FULLY_ASYNC])
def test_kills_at_random_moments(tmp_path: Path, flags: dict[str, Any]) -> None:
    run_with_kills(tmp_path / "run", 3, seed=len(flags), **flags)
