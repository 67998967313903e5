"""The process of the first look: what it finds is returned, whatever users' code does to it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime.preflight.look import start
from slime.preflight.look.start import look
from tests.support.arguments import dry
from tests.unit.preflight.look.conftest import command_line

ROOT = Path(__file__).resolve().parents[2]
HERE = "tests.unit.preflight.look.hooks"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return command_line(tmp_path_factory.mktemp("first-look"))


def test_findings_survive_a_hook_that_ends_the_process(flags):
    """One process for both claims: each imports a tokenizer. Errors come through it in the dry run below."""
    found = look(dry(*flags, "--custom-rm-path", f"{HERE}.ending", "--rollout-max-prompt-len", 3))
    assert (found.errors, found.unchecked) == ([], [])
    dropped, ended = found.warnings
    assert "--rollout-max-prompt-len 3 and are dropped" in dropped
    assert "not looked at to the end: the call of --custom-rm-path" in ended
    assert "ended the process (status 3); it said last: " in ended
    assert "goodbye" in ended


def test_a_look_that_takes_too_long_is_ended(flags, tmp_path, monkeypatch):
    (tmp_path / "first_look_slow.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(start, "DEADLINE_S", 6.0)
    begin = time.monotonic()
    absent = ["--hf-checkpoint", tmp_path / "model", "--prompt-data", tmp_path / "prompts.jsonl"]  # are not looked at
    [said] = look(dry(*flags, *absent, "--custom-rm-path", "first_look_slow.f"), dry_run=True).warnings
    assert time.monotonic() - begin < 60
    assert "took more than 6 s" in said
    assert "the import of --custom-rm-path first_look_slow.f" in said or "the start of" in said


def test_hooks_are_looked_at_where_neither_checkpoint_nor_prompts_are(flags, tmp_path):
    absent = ["--hf-checkpoint", tmp_path / "model", "--prompt-data", tmp_path / "prompts.jsonl"]
    found = look(dry(*flags, *absent, "--custom-rm-path", f"{HERE}.no_such_function"), dry_run=True)
    assert len(found.errors) == 1
    assert "no_such_function" in found.errors[0]
    [said] = look(dry(*flags, *absent), dry_run=True).unchecked
    assert said.startswith("prompts: neither")


def dry_run(flags: list[str], hook: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "train.py", *flags, "--dry-run", "--custom-rm-path", f"{HERE}.{hook}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)


def test_a_dry_run_of_train_py_looks_too(flags):
    done = dry_run(flags, "text")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("train.py: error: --custom-rm-path")
    assert "returned str '1.0'" in done.stderr
    assert len(done.stderr.splitlines()) == 2


def test_warnings_of_the_look_are_on_the_page_of_a_dry_run(flags):
    done = dry_run(flags, "raising")
    assert done.returncode == 0, done.stderr
    assert "raised IndexError: list index out of range" in " ".join(done.stdout.split())
