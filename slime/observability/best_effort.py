"""Writing what is for people: what cannot be written costs the file, never the run.

Samples, metrics and logs go through here. The first failure of each is a warning with its name and the space left; what
waits is kept in memory, up to a bound, and written when there is room again.
"""

from __future__ import annotations

import io
import logging
import os
import threading
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

from slime.utils.atomic_file import PRIVATE, space_left, write_atomically

logger = logging.getLogger(__name__)

MAX_FILES = 64
MAX_BYTES = 64 << 20


class Complaint:
    """Says once that something cannot be written, and once that it can again."""

    def __init__(self, what: str, path: Path) -> None:
        self.what, self.path = what, path
        self._failing = False

    def failed(self, error: Exception) -> None:
        if not self._failing:
            self._failing = True
            logger.warning(
                "%s cannot be written to %s, and the run continues without: %s%s",
                self.what, self.path, error, space_left(self.path),
            )  # fmt: skip

    def worked(self) -> None:
        if self._failing:
            self._failing = False
            logger.warning("%s can be written to %s again", self.what, self.path)


class Files:
    """Writes whole files; those that fail are tried again before the next one. Thread-safe."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._complaint: Complaint | None = None
        self._waiting: OrderedDict[Path, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def write(self, path: Path, content: bytes) -> bool:
        """Write ``content`` to ``path``, atomically, and what waits; return whether everything is written."""
        with self._lock:
            self._waiting[path] = content
            self._waiting.move_to_end(path)
            while len(self._waiting) > MAX_FILES:
                self._waiting.popitem(last=False)
            self._complaint = self._complaint or Complaint(self._what, path.parent)
            while self._waiting:
                first = next(iter(self._waiting))
                try:
                    write_atomically(first, self._waiting[first], private=True)
                except OSError as e:
                    self._complaint.failed(e)
                    return False
                del self._waiting[first]
            self._complaint.worked()
            return True


class Lines:
    """Appends lines to a file; those that fail wait in memory, up to ``MAX_BYTES``. None is written twice or in part.

    A file whose last line was cut off by a kill gets a line end first.
    """

    def __init__(self, what: str, path: Path) -> None:
        self.path = path
        self._complaint = Complaint(what, path)
        self._fd: int | None = None
        self._waiting: deque[bytes] = deque()
        self._bytes = self._begun = self._lost = 0
        self.write(b"")

    def write(self, lines: bytes) -> None:
        """Append ``lines`` (whole ones) after those that wait."""
        if lines:
            self._waiting.append(lines)
            self._bytes += len(lines)
        try:
            self._flush()
        except OSError as e:
            self._complaint.failed(e)
            self._forget()
        else:
            self._complaint.worked()

    def close(self) -> None:
        """Write what waits, and close the file; what cannot be written is lost, with a warning."""
        self.write(b"")
        lost = self._lost + sum(lines.count(b"\n") for lines in self._waiting)
        if lost:
            logger.warning("%d lines of %s could not be written and are lost", lost, self.path)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _flush(self) -> None:
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, PRIVATE)
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                self._waiting.appendleft(b"\n")
                self._bytes += 1
        while self._waiting:
            self._begun += os.write(self._fd, self._waiting[0][self._begun :])
            if self._begun == len(self._waiting[0]):
                self._bytes -= self._begun
                self._begun = 0
                self._waiting.popleft()

    def _forget(self) -> None:
        """Give up the oldest lines where too much waits, but for those that are written in part."""
        while self._bytes > MAX_BYTES and len(self._waiting) > 2:
            oldest = self._waiting[1 if self._begun else 0]
            self._waiting.remove(oldest)
            self._bytes -= len(oldest)
            self._lost += oldest.count(b"\n")


class _Output(io.RawIOBase):
    """A file descriptor to which writing always succeeds, whether or not it arrives.

    Without a buffer of Python's, whose lock would refuse the complaint where that is logged to the same file.
    """

    def __init__(self, fd: int, complaint: Complaint) -> None:
        self._fd, self._complaint = fd, complaint

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        written = 0
        try:
            while written < view.nbytes:
                written += os.write(self._fd, view[written:])
        except OSError as e:
            self._complaint.failed(e)
        else:
            self._complaint.worked()
        return view.nbytes


def output(fd: int, what: str, path: Path) -> io.TextIOWrapper:
    """Return a line-buffered text stream to ``fd``, the open file ``path``, that no full disk stops."""
    raw: Any = _Output(fd, Complaint(what, path))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
