"""Files that an engine leaves on disk are removed with it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import yaml

from slime.backends.sglang_utils import environment
from slime.backends.sglang_utils.environment import Scratch, make_private
from slime.backends.sglang_utils.errors import with_last_lines


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_secrets_are_private_and_gone_once_read() -> None:
    scratch = Scratch()
    try:
        path = scratch.write_secrets({"api_key": "s3cret", "admin_api_key": 'a"d\\m1n'})
        assert yaml.safe_load(path.read_text()) == {"api-key": "s3cret", "admin-api-key": 'a"d\\m1n'}
        assert mode(path) == 0o600
        assert mode(scratch.path) == 0o700
        scratch.remove_secrets()
        assert not path.exists()
    finally:
        scratch.remove()
    assert not scratch.path.exists()
    scratch.remove()


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    directory = tmp_path / "shm"
    directory.mkdir()
    monkeypatch.setattr(environment, "SHARED_MEMORY", directory)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return directory


def test_the_engines_shared_memory_goes_with_it(shared_memory: Path) -> None:
    scratch, other = Scratch(), Scratch()
    for each in (scratch, other):
        (shared_memory / f"{each.path.name}-sglang_loads_1.shm").touch()
    scratch.remove()
    assert [p.name for p in shared_memory.iterdir()] == [f"{other.path.name}-sglang_loads_1.shm"]
    other.remove()
    assert not list(shared_memory.iterdir())


def test_what_a_killed_owner_left_is_swept_and_what_lives_is_not(shared_memory: Path, tmp_path: Path) -> None:
    code = """
        import os
        from slime.backends.sglang_utils.environment import Scratch
        scratch = Scratch()
        print(scratch.path, flush=True)
        os._exit(9)
    """
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[4])}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    dead = Path(run.stdout.strip())
    assert run.returncode == 9
    assert dead.is_dir()
    (shared_memory / f"{dead.name}-sglang_loads_1.shm").touch()
    mine = Scratch()
    assert dead.is_dir(), "its engine may still be ending"
    for path in (dead, mine.path):
        os.utime(path, (0, 0))
    another = Scratch()
    assert not dead.exists()
    assert not list(shared_memory.iterdir())
    assert mine.path.is_dir()
    for scratch in (mine, another):
        scratch.remove()


def test_a_private_log_keeps_its_lines(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "engine_0.log"
    make_private(log)
    log.write_text("one\n")
    log.chmod(0o644)
    make_private(log)
    assert (log.read_text(), mode(log)) == ("one\n", 0o600)


def test_messages_end_with_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "engine_0.log"
    assert with_last_lines("engine 0 exited.", log, ["a", "b"]) == (
        f"engine 0 exited.\nLast lines of {log}:\n  | a\n  | b"
    )
    assert "the log is empty" in with_last_lines("engine 0 exited.", log, [])
