"""One writer per directory: refused with its name, taken over when it is gone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slime.utils import directory_lock
from slime.utils.directory_lock import NAME, DirectoryLock, HeldByAnother, Owner

HOLDER = """
import sys, time
from pathlib import Path
from slime.utils.directory_lock import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]), "--save x", "python train.py --first")
if len(sys.argv) > 2:
    import os
    if os.fork() != 0:  # the child says so: a helper that outlives its parent
        time.sleep(60)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process (group) that holds the lock of ``tmp_path``."""
    started = []

    def holder(*more: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", HOLDER, str(tmp_path / NAME), *more]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield holder
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def lock(folder: Path) -> DirectoryLock:
    return DirectoryLock(folder / NAME, f"--save {folder}", "python train.py --second")


def test_the_second_is_refused_at_once_with_the_name_of_the_first(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    first = start()
    before = (tmp_path / NAME).read_text()
    begun = time.monotonic()
    with pytest.raises(HeldByAnother) as refused:
        lock(tmp_path)
    assert time.monotonic() - begun < 1
    said = str(refused.value)
    for word in (str(tmp_path), f"process {first.pid}", os.uname().nodename, "python train.py --first", NAME):
        assert word in said
    assert (tmp_path / NAME).read_text() == before


@pytest.mark.parametrize("more", [(), ("with a child",)], ids=["alone", "with a child that lives on"])
def test_a_killed_owner_holds_nothing(
    tmp_path: Path,
    start: Callable[..., subprocess.Popen[str]],
    caplog: pytest.LogCaptureFixture,
    more: tuple[str, ...],
) -> None:
    first = start(*more)
    first.kill()
    first.wait()
    begun = time.monotonic()
    held = lock(tmp_path)
    assert time.monotonic() - begun < 1
    assert f"process {first.pid}" in caplog.text
    assert "taken over" in caplog.text
    held.release()


def test_release_leaves_nothing_and_frees_it(tmp_path: Path) -> None:
    for _ in range(2):
        held = lock(tmp_path)
        with pytest.raises(HeldByAnother, match=f"process {os.getpid()} "):
            lock(tmp_path)
        held.release()
        held.release()
        assert not list(tmp_path.iterdir())


def owner(**changes: object) -> Owner:
    return replace(Owner.here("python train.py --other"), **changes)  # type: ignore[arg-type]


def leave(folder: Path, by: Owner, *, silent_s: float) -> Path:
    """Leave a lock file whose last heartbeat is ``silent_s`` seconds old, as a file server shows it: not locked."""
    file = folder / NAME
    file.write_text(by.to_json())
    os.utime(file, (time.time() - silent_s,) * 2)
    return file


def test_another_host_is_respected_while_its_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_lock, "HEARTBEAT_S", 0.1)
    file = leave(tmp_path, owner(host="node-7", boot="another"), silent_s=3)
    beat = subprocess.Popen(["sh", "-c", f"sleep 0.3; touch {file}"])
    with pytest.raises(HeldByAnother, match="on node-7"):
        lock(tmp_path)
    beat.wait()
    assert json.loads(file.read_text())["host"] == "node-7"


@pytest.mark.parametrize("silent_s", [3600, 59.5], ids=["silent for long", "silent until it is old"])
def test_another_host_that_is_silent_is_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, silent_s: float
) -> None:
    leave(tmp_path, owner(host="node-7", boot="another"), silent_s=silent_s)
    held = lock(tmp_path)
    assert "node-7" in caplog.text
    assert "taken over" in caplog.text
    held.release()


LOCKS = """
import fcntl, sys, time
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def kept_by_the_server(tmp_path: Path) -> Iterator[Path]:
    """The lock of a host that is gone, which a file server keeps."""
    file = leave(tmp_path, owner(host="node-7", boot="another"), silent_s=3600)
    process = subprocess.Popen([sys.executable, "-c", LOCKS, str(file)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield file
    process.kill()
    process.wait()


def test_a_lock_that_the_server_keeps_for_a_host_that_is_gone_is_taken_over(
    tmp_path: Path, kept_by_the_server: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = lock(tmp_path)
    assert "node-7" in caplog.text
    assert "taken over" in caplog.text
    assert Owner.parse(kept_by_the_server.read_text()) == held._owner
    with pytest.raises(HeldByAnother, match=f"process {os.getpid()} "):
        lock(tmp_path)
    held.release()
    assert not list(tmp_path.iterdir())


def test_a_locked_file_of_another_host_is_respected_while_its_heart_beats(
    tmp_path: Path, kept_by_the_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_lock, "HEARTBEAT_S", 0.1)
    os.utime(kept_by_the_server)
    beat = subprocess.Popen(["sh", "-c", f"sleep 0.3; touch {kept_by_the_server}"])
    with pytest.raises(HeldByAnother, match="on node-7"):
        lock(tmp_path)
    beat.wait()


def test_who_is_taking_it_over_is_given_time_to_write_its_name(tmp_path: Path, kept_by_the_server: Path) -> None:
    name = tmp_path / "name"
    name.write_text(owner(pid=1).to_json())
    write = subprocess.Popen(["sh", "-c", f"sleep 0.3; cat {name} > {kept_by_the_server}"])
    with pytest.raises(HeldByAnother, match="process 1 "):
        lock(tmp_path)
    write.wait()


def test_of_several_that_take_over_the_last_has_it(
    tmp_path: Path, kept_by_the_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_lock, "SETTLE_S", 0.0)
    written = DirectoryLock._write

    def removed(self: DirectoryLock) -> None:
        written(self)
        kept_by_the_server.unlink()

    monkeypatch.setattr(DirectoryLock, "_write", removed)
    with pytest.raises(HeldByAnother):
        lock(tmp_path)


def test_another_host_that_ends_while_it_is_watched_leaves_the_lock_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_lock, "HEARTBEAT_S", 0.1)
    file = leave(tmp_path, owner(host="node-7", boot="another"), silent_s=0)
    end = subprocess.Popen(["sh", "-c", f"sleep 0.3; rm {file}"])
    held = lock(tmp_path)
    assert Owner.parse(file.read_text()) == held._owner
    end.wait()
    held.release()


def test_a_lock_file_that_is_no_longer_readable_is_respected_like_another_hosts(tmp_path: Path) -> None:
    file = leave(tmp_path, owner(), silent_s=3600)
    file.write_bytes(b"\x80 nonsense")
    os.utime(file, (0, 0))
    lock(tmp_path).release()


def without_flock(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_without_flock_the_process_itself_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[..., subprocess.Popen[str]]
) -> None:
    first = start()
    monkeypatch.setattr(fcntl, "flock", without_flock)
    with pytest.raises(HeldByAnother, match=f"process {first.pid} "):
        lock(tmp_path)
    first.kill()
    first.wait()
    held = lock(tmp_path)
    assert Owner.parse((tmp_path / NAME).read_text()) == held._owner
    held.release()


def test_without_flock_one_of_several_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", without_flock)
    other = owner(pid=1, ticks=0)
    written = DirectoryLock._write

    def overtaken(self: DirectoryLock) -> None:
        written(self)
        (tmp_path / NAME).write_text(other.to_json())

    monkeypatch.setattr(DirectoryLock, "_write", overtaken)
    with pytest.raises(HeldByAnother, match="process 1 "):
        lock(tmp_path)


def test_a_later_process_of_the_same_number_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", without_flock)
    here = Owner.here("")
    assert here.is_alive() is True
    leave(tmp_path, owner(ticks=here.ticks - 1), silent_s=0)
    lock(tmp_path).release()


def test_the_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(directory_lock, "HEARTBEAT_S", 0.02)
    held = lock(tmp_path)
    os.utime(tmp_path / NAME, (0, 0))
    deadline = time.monotonic() + 10
    while os.stat(tmp_path / NAME).st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert time.time() - os.stat(tmp_path / NAME).st_mtime < 10
    (tmp_path / NAME).unlink()
    with caplog.at_level(logging.ERROR):
        while "removed or taken" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    assert str(tmp_path / NAME) in caplog.text
    held.release()
