"""The parts of ``make soak`` and the record of what passed."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import SOAK_TESTS
from tools import soak

PARTS = {
    "all": ["tests/unit"],
    "gpu": ["tests/unit/b/test_x.py::test_gpu", "tests/unit/c"],
    "one": ["tests/s.py::t[a]"],
}


def test_every_soak_test_that_was_collected_is_in_one_part(request: pytest.FixtureRequest) -> None:
    parts = soak.read_parts()
    collected = request.config.stash[SOAK_TESTS]
    assert {test: found for test in collected if len(found := soak.part_of(test, parts)) != 1} == {}


def test_what_parts_and_record_name_is_there() -> None:
    parts = soak.read_parts()
    files = {entry.partition("::")[0] for entries in parts.values() for entry in entries}
    assert [name for name in sorted(files) if not (soak.ROOT / name).exists()] == []
    assert set(soak.read_record()) <= set(parts)


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("tests/unit/a/test_y.py::test_gpu", ["all"]),
        ("tests/unit/b/test_x.py::test_gpu", ["gpu"]),
        ("tests/unit/b/test_x.py::test_gpu[1]", ["gpu"]),
        ("tests/unit/b/test_x.py::test_gpus", ["all"]),
        ("tests/unit/c/test_x.py::test", ["gpu"]),
        ("tests/s.py::t[a]", ["one"]),
        ("tests/s.py::t[ab]", []),
        ("tests/unity.py::t", []),
    ],
)
def test_the_longest_entry_decides(test: str, expected: list[str]) -> None:
    assert soak.part_of(test, PARTS) == expected


def test_a_test_of_two_parts_is_seen() -> None:
    assert soak.part_of("tests/a.py::t", {"one": ["tests/a.py"], "two": ["tests/a.py"]}) == ["one", "two"]


def test_a_part_leaves_out_what_another_names_more_closely() -> None:
    closer = ["--deselect", "tests/unit/b/test_x.py::test_gpu", "--deselect", "tests/unit/c"]
    assert soak.pytest_words("all", PARTS) == ["tests/unit", *closer]
    assert soak.pytest_words("gpu", PARTS) == PARTS["gpu"]


def git(directory: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    subprocess.run(["git", *who, *words], cwd=directory, check=True, capture_output=True)


def runs_on_every_change(path: Path) -> bool:
    """Return True if a test of the file, or one of its cases, has no mark of soak."""
    whole = r"(?<!marks=pytest\.)mark\.soak"  # not that of a case
    body = ast.parse(path.read_text()).body
    modules = [ast.unparse(node) for node in body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    tests = [
        node
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    marks = [" ".join([*modules, *map(ast.unparse, node.decorator_list)]) for node in tests]
    return any(not re.search(whole, mark) for mark in marks)


def test_what_is_said_to_run_on_every_change_does() -> None:
    """Files with tests in soak name those that protect the same claim meanwhile."""
    folder, wrong = soak.ROOT / "tests", {}
    for path in folder.rglob("*.py"):
        for sentence in re.findall(r"[Oo]n every change(.*?)(?:\"\"\"|\n\n)", path.read_text(), re.S):
            for name in re.findall(r"\b(?:test)?_\w+\.py", sentence):
                found = [file for file in folder.rglob(f"*{name}") if "soak" not in file.relative_to(folder).parts]
                if not any(map(runs_on_every_change, found)):
                    wrong[f"{path.relative_to(folder)}: {name}"] = [str(file.relative_to(folder)) for file in found]
    assert wrong == {}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of one test that passes and one that can be made to fail or be skipped."""
    (tmp_path / "tests/soak").mkdir(parents=True)
    (tmp_path / "tests/conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--durations-file')\n")
    (tmp_path / "tests/soak/test_a.py").write_text("import pytest\npytestmark = pytest.mark.soak\ndef test(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = soak\n    gpu\n")
    (tmp_path / ".gitignore").write_text("build\n__pycache__\n.pytest_cache\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "a")
    return tmp_path


def head(directory: Path) -> str:
    return soak.git("rev-parse", "--short=12", "HEAD", root=directory).stdout.strip()


def test_what_passed_is_recorded_and_stale_once_a_file_changes(checkout: Path) -> None:
    parts = {"a": ["tests/soak"]}
    passed = soak.run_part("a", parts, checkout)
    assert passed is not None
    assert (passed.commit, passed.passed, passed.skipped) == (head(checkout), 1, 0)
    soak.write_record({"a": passed}, checkout)
    assert soak.read_record(checkout) == {"a": passed}
    assert not soak.changed_since(passed.commit, checkout)  # the record itself does not count
    (checkout / "docs").mkdir()
    (checkout / "docs/page.md").write_text("words")
    assert not soak.changed_since(passed.commit, checkout)
    (checkout / "new.py").write_text("")
    assert soak.changed_since(passed.commit, checkout)
    (checkout / "new.py").unlink()
    (checkout / "tests/soak/test_a.py").write_text("")
    assert soak.changed_since(passed.commit, checkout)
    assert soak.changed_since("0123456789ab", checkout)


@pytest.mark.parametrize("body", ["raise ValueError", "pytest.skip('not here')"])
def test_a_failure_and_skipped_tests_alone_are_no_pass(
    checkout: Path, body: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file = checkout / "tests/soak/test_a.py"
    file.write_text(file.read_text().replace("pass", body))
    assert soak.run_part("a", {"a": ["tests/soak"]}, checkout) is None
    expected = "failed after" if "raise" in body else "every test was skipped, so nothing is recorded"
    assert f"[soak] a: {expected}" in capfd.readouterr().out


def test_what_passed_runs_again_only_when_named_or_asked_for(checkout: Path) -> None:
    nothing = {"named": False, "stale": False, "again": False, "root": checkout}
    last = soak.run_part("a", {"a": ["tests/soak"]}, checkout)
    assert soak.is_due(None, **nothing)
    for word in ("named", "again"):
        assert soak.is_due(last, **{**nothing, word: True})
    assert not soak.is_due(last, **{**nothing, "stale": True})
    (checkout / "new.py").write_text("")
    assert not soak.is_due(last, **nothing)
    assert soak.is_due(last, **{**nothing, "stale": True})
