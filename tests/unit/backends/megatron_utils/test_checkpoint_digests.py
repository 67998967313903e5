"""Digests of checkpoints: what fails on one rank is said by all, and no file is read twice without need."""

from __future__ import annotations

from pathlib import Path

from tests.support.distributed import run_distributed


def test_a_directory_that_cannot_be_listed_is_said_on_all_ranks(tmp_path: Path) -> None:
    target = "tests.unit.backends.megatron_utils.digest_ranks:write_where_nothing_is_listed"
    for said in run_distributed(target, 2, {"folder": str(tmp_path)}, timeout=60):
        assert said.startswith(f"{tmp_path} cannot be read back: ")
        assert "Stale file handle" in said
