"""Reading the metrics of a run that is in progress."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.run_train import read_metric

LINES = [json.dumps({"step": step, "name": name, "value": step / 2}) + "\n" for step in (0, 1) for name in ("a", "b")]


def test_a_line_that_is_being_written_is_not_read_yet(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_metric(tmp_path, "a") == {}
    for end in range(len(LINES[3])):
        file.write_text("".join(LINES[:3]) + LINES[3][:end])
        assert read_metric(tmp_path, "a") == {0: 0.0, 1: 0.5}
        assert read_metric(tmp_path, "b") == {0: 0.0}
    file.write_text("".join(LINES))
    assert read_metric(tmp_path, "b") == {0: 0.0, 1: 0.5}


def test_a_complete_line_that_is_broken_fails(tmp_path: Path) -> None:
    for broken in (LINES[1][:20] + "\n", "".join([LINES[1][:20] + "\n", LINES[2]])):
        (tmp_path / "metrics.jsonl").write_text(LINES[0] + broken)
        with pytest.raises(json.JSONDecodeError):
            read_metric(tmp_path, "a")
