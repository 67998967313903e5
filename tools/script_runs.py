"""Dry runs of the launch scripts: what each would run, read from its resolved configuration and its plan."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
TIMEOUT_S = 120
CONFIG_FOLDER = "slime-dry-run-"
"""Beginning of the directories for temporary files in which scripts write their configuration."""
_VERDICT = re.compile(r"^A real run would (start|be refused:\n(.*))", re.DOTALL | re.MULTILINE)
_REASON = re.compile(r"- (.*?)(?=\n  - |\Z)", re.DOTALL)


@dataclass(frozen=True)
class DryRun:
    """One script's dry run: its path below ``scripts``, exit status, output and resolved configuration (YAML text)."""

    name: str
    status: int
    out: str
    err: str
    config: str

    @cached_property
    def values(self) -> dict[str, Any]:
        """The resolved configuration: attribute -> value."""
        import yaml

        sections = yaml.safe_load(self.config)
        return {**sections["defaults"], **sections["derived"], **sections["arguments"]}

    @property
    def refusals(self) -> list[str]:
        """Why this version would refuse a real run, one sentence each. Raises ValueError when the plan does not say."""
        verdict = _VERDICT.search(self.out)
        reasons = [" ".join(reason.split()) for reason in _REASON.findall(verdict[2] or "")] if verdict else []
        if verdict is None or (verdict[1] != "start" and not reasons):
            raise ValueError(f"the plan of {self.name} does not say whether and why a real run would be refused")
        return reasons


def script_names(scripts: Path = SCRIPTS) -> list[str]:
    """The launch scripts below ``scripts``, those of the top first."""
    folders = (scripts, scripts / "low_precision")
    paths = [path for folder in folders for path in sorted(folder.glob("run-*.sh"), key=lambda path: path.stem)]
    return [path.relative_to(scripts).as_posix() for path in paths]


def dry_run(name: str, scripts: Path = SCRIPTS, words: Sequence[str] = (), **process: Any) -> DryRun:
    """Run one script with ``SLIME_DRY_RUN=1`` and ``words`` after its name; ``process`` goes to ``subprocess.run``."""
    env: Mapping[str, str] = process.pop("env", os.environ)
    with tempfile.TemporaryDirectory(prefix=CONFIG_FOLDER) as folder:
        config = Path(folder) / "config.yaml"
        done = subprocess.run(
            [str(scripts / name), "--dump-config", str(config), *words],
            env={**env, "SLIME_DRY_RUN": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            **process,
        )
        text = config.read_text() if config.is_file() else ""
    return DryRun(name, done.returncode, done.stdout, done.stderr, text)


def dry_runs(names: Sequence[str], **how: Any) -> dict[str, DryRun]:
    """Run several scripts, as many at a time as there are cores; ``how`` as for ``dry_run``."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(names, pool.map(lambda name: dry_run(name, **how), names), strict=True))
