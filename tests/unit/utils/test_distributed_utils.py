"""Gloo groups of a trainer rank share one polling thread."""

from __future__ import annotations

import pytest

from tests.support.distributed import run_distributed

pytestmark = pytest.mark.slow


def test_gloo_groups_share_a_device() -> None:
    for found in run_distributed("tests.unit.utils.gloo_ranks:sums_over_groups", 2, {"count": 4}, timeout=60):
        assert found["sums"] == [[20 * i + 1] for i in range(4)]
        assert found["timeouts"] == [50, 51, 52, 53]
        assert found["polling"] == 1
