"""What an engine leaves on disk is removed with it."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import pytest

from slime.backends.sglang_utils.errors import with_last_lines
from slime.backends.sglang_utils.scratch import Scratch, make_private


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_secrets_are_private_and_gone_once_read() -> None:
    scratch = Scratch()
    try:
        path = scratch.write_secrets({"api_key": "s3cret", "admin_api_key": "adm1n"})
        assert path.read_text() == 'api-key: "s3cret"\nadmin-api-key: "adm1n"\n'
        assert mode(path) == 0o600
        assert mode(scratch.path) == 0o700
        scratch.note_ready(os.getpid())
        assert not path.exists()
    finally:
        scratch.remove()
    assert not scratch.path.exists()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm on this machine")
def test_shared_memory_that_the_engine_mapped_is_removed() -> None:
    mine = Path(f"/dev/shm/sglang_test_{os.getpid()}.shm")
    other = Path(f"/dev/shm/sglang_other_{os.getpid()}.shm")
    for path in (mine, other):
        path.write_bytes(b"\0" * mmap.PAGESIZE)
    try:
        with mine.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            scratch = Scratch()
            scratch.note_ready(os.getpid())
        scratch.remove()
        assert not mine.exists()
        assert other.exists()
    finally:
        for path in (mine, other):
            path.unlink(missing_ok=True)


def test_a_process_that_has_just_ended_is_no_error() -> None:
    scratch = Scratch()
    scratch.note_ready(2**22 + 1)  # beyond the largest process id
    scratch.remove()
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
