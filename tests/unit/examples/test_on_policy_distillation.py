"""The examples of on-policy distillation, as a dry run, and what the one without a GPU is made of."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "examples" / "on_policy_distillation"


@pytest.mark.parametrize("script", ["run-qwen3-8B-opd.sh", "run-qwen3-8B-opd-megatron.sh"])
def test_nothing_of_the_scripts_is_refused(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(FOLDER / script)],
        env={**os.environ, "SLIME_DRY_RUN": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "A real run would start" in done.stdout
    assert "not available" not in done.stdout + done.stderr
    assert script in (FOLDER / "README.md").read_text()
