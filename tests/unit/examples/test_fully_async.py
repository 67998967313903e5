"""The example of the fully asynchronous rollout, as a dry run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import yaml

SCRIPT = Path(__file__).parents[3] / "examples" / "fully_async" / "run-qwen3-4B-fully-async.sh"


def test_the_plan_is_what_the_page_of_the_example_says(tmp_path: Path):
    config = tmp_path / "config.yaml"
    done = subprocess.run(
        [str(SCRIPT), "--dump-config", str(config)],
        env={**os.environ, "SLIME_DRY_RUN": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "train_async.py: generation never stops" in done.stdout
    assert "no token is trained on that lags more than 2 steps" in done.stdout
    assert "not available" not in done.stdout + done.stderr
    text = config.read_text()
    assert yaml.safe_load(text)
    page = (SCRIPT.parent / "README.md").read_text()
    for flag in ("--max-staleness 2", "--sglang-server-concurrency 64", "--use-tis"):
        assert flag in page
        assert flag in SCRIPT.read_text()
