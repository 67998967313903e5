"""Ranks of an engine over several hosts meet at the one address that its first rank listens at."""

from __future__ import annotations

from tests.support.distributed import run_distributed


def test_ranks_above_the_first_look_where_it_writes() -> None:
    first, second = run_distributed("tests.unit.backends.sglang_utils.rendezvous_ranks:sum_over_hosts", 2, timeout=60)
    assert first == {"sum": 3.0, "own store": True}
    assert second == {"sum": 3.0, "own store": False}
