"""A copy of slime with the code of a page that says how to add something, and programs that run on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.run_train import ROOT
from tools.markdown import read_page


def follow(page: Path, folder: Path) -> None:
    """Copy slime to ``folder`` and put the Python fences of ``page`` where their first lines say.

    That is ``# PATH`` for a new file and ``# PATH, a row of TABLE`` for a row at the end of a table.
    """
    shutil.copytree(ROOT / "slime", folder / "slime", ignore=shutil.ignore_patterns("__pycache__"))
    for fence in read_page(page).fences:
        if fence.language != "python":
            continue
        where, _, text = fence.text.partition("\n")
        path, _, table = where.removeprefix("# ").partition(", a row of ")
        file = folder / path
        if not table:
            assert not file.exists(), path
            file.write_text(text)
            continue
        before, begin, rest = file.read_text().partition(f"\n{table} = (\n")
        rows, end, after = rest.partition("\n)")
        assert end, f"{path} has no table {table}"
        file.write_text(f"{before}{begin}{rows}\n{text}{end}{after}")


def run_followed(folder: Path, program: str) -> Any:
    """Return what ``program`` prints last, as JSON, with slime of ``folder``."""
    paths = os.pathsep.join((str(folder), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
