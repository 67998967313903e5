"""Ten thousand histories of the journal, each cut or damaged at a random byte."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from slime.rollout import journal
from tests.support.journal_model import check_one_history

pytestmark = pytest.mark.soak


@pytest.mark.timeout(1800)
def test_ten_thousand_histories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "sync", lambda path: None)  # kills do not need it, and it is slow
    for seed in range(1000, 11000):
        check_one_history(tmp_path / "rollout", seed)
        shutil.rmtree(tmp_path / "rollout")
