"""The summary of what tests cost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tests.support import durations


def report(test: str, when: str, seconds: float) -> SimpleNamespace:
    return SimpleNamespace(nodeid=test, when=when, duration=seconds)


def test_phases_are_added_and_the_slowest_come_first(tmp_path: Path) -> None:
    reports = [
        report("a.py::one", "setup", 3.0),
        report("a.py::one", "call", 0.5),
        report("a.py::one", "teardown", 0.25),
        report("b.py::two[x::y]", "call", 5.0),
        report("b.py::three", "call", 0.5),
        report("c.py::four", "call", 0.5),
        SimpleNamespace(nodeid="broken.py", duration=9.0),  # an error of collection
    ]
    written = durations.write_summary(tmp_path / "new" / "durations.txt", reports)
    assert (tmp_path / "new" / "durations.txt").read_text() == written
    total, tests, files = (part.splitlines() for part in written.split("\n\n"))
    assert total == ["     9.8 s  4 tests in 3 files"]
    assert [line.split()[-1] for line in tests[1:3]] == ["b.py::two[x::y]", "a.py::one"]
    assert files[1:] == ["     5.5 s  b.py", "     3.8 s  a.py"]


def test_only_the_slowest_tests_are_named(tmp_path: Path) -> None:
    text = durations.summary({f"a.py::test_{i}": 1.0 + i for i in range(100)})
    assert "a.py::test_99" in text
    assert "a.py::test_59" not in text
