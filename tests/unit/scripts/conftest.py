"""The repository that a script of a test is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.script_repository import Repository, make_repository


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """A copy of the scripts beside which nothing real can be started, not even Python."""
    made = make_repository(tmp_path)
    made.stand_in(made.bin / "python3", "exit 0")
    return made
