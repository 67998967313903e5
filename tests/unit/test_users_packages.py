"""A project's own packages on PYTHONPATH are found, whatever folders stand beside train.py, which is first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEEN_FIRST = ("slime", "slime_plugins")
"""Packages that a run needs from here."""


def top_level() -> list[str]:
    return sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name.isidentifier())


def test_no_other_folder_is_a_regular_package() -> None:
    found = [name for name in top_level() if (ROOT / name / "__init__.py").exists()]
    assert sorted(found) == sorted(SEEN_FIRST)


def imports(tmp_path: Path, *names: str) -> list[str]:
    """Import ``names`` as a process that runs train.py does; return the files that they come from."""
    program = (
        "import importlib, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"for name in {names!r}: print(importlib.import_module(name).__file__)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "mine")},
    )  # fmt: skip
    return result.stdout.split()


@pytest.mark.parametrize("name", ["tools", "tests", "examples", "scripts", "docs", "docker", "requirements"])
@pytest.mark.parametrize("is_regular", [True, False])
def test_a_package_of_the_users_own_wins(tmp_path: Path, name: str, is_regular: bool) -> None:
    package = tmp_path / "mine" / name
    package.mkdir(parents=True)
    (package / "search_retrieval.py").write_text("")
    if is_regular:
        (package / "__init__.py").write_text("")
    assert imports(tmp_path, f"{name}.search_retrieval") == [str(package / "search_retrieval.py")]


def test_without_one_ours_are_found_and_beside_one_without_init(tmp_path: Path) -> None:
    (tmp_path / "mine" / "tools").mkdir(parents=True)
    ours = ["tools.markdown", "examples.executions"]
    assert imports(tmp_path, *ours) == [f"{ROOT}/{name.replace('.', '/')}.py" for name in ours]
