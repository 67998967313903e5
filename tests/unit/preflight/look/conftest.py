from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.preflight.look import Findings
from slime.preflight.look.child import look
from tests.support.arguments import dry
from tests.support.run_train import rl_flags, sums_file
from tools.tiny_model import make_tiny_checkpoint


def command_line(root: Path) -> list[str]:
    """Return one without a mistake: chat prompts with labels, and a model with a tokenizer and 1024 positions."""
    sizes = ["--num-rollout", "2", "--rollout-batch-size", "1", "--global-batch-size", "4"]
    return [*rl_flags(make_tiny_checkpoint(root / "model"), sums_file(root / "sums.jsonl")), *sizes]


@pytest.fixture(scope="session")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return command_line(tmp_path_factory.mktemp("first-look"))


@pytest.fixture
def found(flags: list[str]) -> Callable[..., Findings]:
    """Return what is found with more flags."""

    def find(*more: Any, dry_run: bool = False) -> Findings:
        findings = Findings()
        look(dry(*flags, *more), dry_run, findings)
        return findings

    return find


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes rows, or lines as they are, to a prompt file."""

    def write(*rows: Any) -> Path:
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        (tmp_path / "prompts.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        return tmp_path / "prompts.jsonl"

    return write
