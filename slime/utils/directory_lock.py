"""A directory, or the files of a path template, that one run at a time may write to; the lock says who holds it.

The lock is a file ``.run.lock`` that holds its owner as JSON, and is locked (``flock``) as long as the owner lives: a
killed one holds nothing. Other hosts of a shared file system, and file systems without ``flock``, do not see that;
there the file's time is the owner's heartbeat. A file server may also keep the lock of a host that is gone: it is taken
over with a new file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

NAME = ".run.lock"
HEARTBEAT_S = 5.0
STALE_S = 60.0
"""Seconds that an owner that cannot be asked may be silent before it counts as gone."""
SETTLE_S = 1.0
"""Longer than another process takes from reading the file to writing it."""
SHOWN_CHARS = 300
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_WITHOUT_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class HeldByAnother(RuntimeError):
    """Another process that is alive holds the lock."""


@dataclass(frozen=True)
class Owner:
    """A process; a later one of the same number differs in ``ticks``, the time of its start in the kernel's count.

    ``boot``: of its machine. ``pids``: the namespace that its number is of. ``since``: when it took the lock.
    """

    host: str
    pid: int
    ticks: int
    boot: str
    pids: int
    since: str
    command: str

    @classmethod
    def here(cls, command: str) -> Owner:
        """Return this process."""
        pids = os.stat("/proc/self/ns/pid").st_ino
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        return cls(socket.gethostname(), os.getpid(), _ticks(os.getpid()) or 0, _boot(), pids, since, command)

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Return the owner that ``text`` describes, None for anything else."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None

    def is_alive(self) -> bool | None:
        """Return whether the process runs; None where that is not seen from here: another host or container."""
        if self.boot != _boot() or self.pids != os.stat("/proc/self/ns/pid").st_ino:
            return None
        return _ticks(self.pid) == self.ticks

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    def __str__(self) -> str:
        command = self.command if len(self.command) <= SHOWN_CHARS else self.command[:SHOWN_CHARS] + " ..."
        return f"process {self.pid} on {self.host}, since {self.since}: {command}"


class DirectoryLock:
    """Holds ``file`` from its creation to ``release``, or the end of this process.

    ``what`` names it in messages. Raises HeldByAnother, at once where the owner can be seen and otherwise as soon as it
    gives a sign of life, and OSError where the file cannot be made. What a dead owner left is taken over, with a
    warning.
    """

    def __init__(self, file: Path, what: str, command: str) -> None:
        self.file, self.what = file, what
        self._owner = Owner.here(command)
        self._end = threading.Event()
        self._exclusive = True
        self._fd = self._open()
        os.register_at_fork(after_in_child=self._close)  # or a child that lives longer would hold it
        try:
            self._write()
        except OSError as e:
            logger.warning("%s: the owner of the lock %s cannot be noted: %s", what, file, e)
        if not self._exclusive:
            self._settle()
        threading.Thread(target=self._beat, name="directory-lock", daemon=True).start()

    def release(self) -> None:
        """Remove the file. Calling it again does nothing."""
        if self._fd is None:
            return
        self._end.set()
        with contextlib.suppress(OSError):
            if self._is_ours():
                self.file.unlink()
        self._close()

    # Inside

    def _open(self) -> int | None:
        """Open and lock the file; return its descriptor."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        while True:
            fd = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                self._take(fd)
                if _is_at(fd, self.file):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # its owner has just ended, and removed it

    def _take(self, fd: int) -> None:
        """Lock the open file, when no other process that lives has it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._replace(fd)
            return
        except OSError as e:
            if e.errno not in _WITHOUT_FLOCK:
                raise
            self._exclusive = False
        text = os.pread(fd, 1 << 20, 0).decode(errors="replace")
        if not text:
            return
        before = Owner.parse(text)
        alive = None if before is None else before.is_alive()
        if before is not None and before.boot == self._owner.boot and self._exclusive:
            alive = False  # this kernel would know of its lock, in any container
        if alive is None:
            alive = self._beats(fd)
        if alive:
            self._refuse(text)
        logger.warning("%s was held by %s, which is gone: taken over", self.what, before or "an unknown owner")

    def _replace(self, fd: int) -> None:
        """Remove the file that another process has locked, when that is of another host and silent."""
        text = os.pread(fd, 1 << 20, 0).decode(errors="replace")
        owner = Owner.parse(text)
        if owner is None or owner.boot == self._owner.boot or self._beats(fd):
            self._refuse(text)
        time.sleep(SETTLE_S)  # who has locked it may be taking it over too, and about to write its name
        if (now := os.pread(fd, 1 << 20, 0).decode(errors="replace")) != text:
            self._refuse(now)
        if _is_at(fd, self.file):
            self.file.unlink(missing_ok=True)
            self._exclusive = False  # another process may be about to remove what it takes for the same file
            logger.warning("%s was held by %s, which is silent: taken over", self.what, owner)

    def _settle(self) -> None:
        """Of several processes that wrote their names at one time, the last has it."""
        time.sleep(SETTLE_S)
        try:
            text = self.file.read_text(errors="replace")
        except FileNotFoundError:
            text = ""
        if text != self._owner.to_json():
            self._close()
            self._refuse(text)

    def _beats(self, fd: int) -> bool:
        """Watch the file until its owner gives a sign of life, or has been silent for ``STALE_S``."""
        last = os.fstat(fd).st_mtime
        silent_s = max(0.0, _now_of(self.file.parent) - last)
        if silent_s < STALE_S:
            logger.warning("%s: waiting up to %.0f s for a sign of its last owner", self.what, STALE_S - silent_s)
        deadline = time.monotonic() + STALE_S - silent_s
        while time.monotonic() < deadline:
            time.sleep(min(1.0, HEARTBEAT_S / 5))
            if not _is_at(fd, self.file):  # its owner has just ended, and removed it
                return False
            if os.fstat(fd).st_mtime != last:
                return True
        return False

    def _refuse(self, text: str) -> None:
        raise HeldByAnother(
            f"{self.what} is being written by another run, {Owner.parse(text) or 'whose name cannot be read'}. Let it "
            f"end, or end it, or choose another directory; if that process is certainly gone, remove {self.file}"
        )

    def _write(self) -> None:
        assert self._fd is not None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, self._owner.to_json().encode(), 0)

    def _beat(self) -> None:
        while not self._end.wait(HEARTBEAT_S):
            try:
                if not self._is_ours():
                    logger.error("%s: the lock %s was removed or taken by another process", self.what, self.file)
                    return
                os.utime(self.file)
            except OSError as e:  # a full disk, or a server that is away: the next one may arrive
                logger.debug("%s: no heartbeat: %s", self.file, e)

    def _is_ours(self) -> bool:
        return self._fd is not None and _is_at(self._fd, self.file)

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _is_at(fd: int, file: Path) -> bool:
    """Return whether ``file`` is what is open as ``fd``."""
    try:
        found, own = os.stat(file), os.fstat(fd)
    except OSError as e:
        if e.errno not in (errno.ENOENT, errno.ESTALE):  # the latter of a file that another host removed
            raise
        return False
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)


def _now_of(directory: Path) -> float:
    """Return the time as the file system of ``directory`` has it: a server's clock may be another."""
    probe = directory / f"{NAME}.{os.getpid()}.now"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        probe.unlink(missing_ok=True)


def _ticks(pid: int) -> int | None:
    """Return when process ``pid`` was started, None for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
