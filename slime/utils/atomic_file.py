"""Files that appear whole or not at all: written beside their name, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
PRIVATE = 0o600


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path in the directory of ``path`` (made if need be), and rename it to ``path`` at the end.

    A reader sees the old content or the new one, never a part, also when this process is killed in between. With
    ``durable`` the content is on the disk when this returns, so that it outlives the machine too. After an exception
    ``path`` is as it was and nothing is left beside it. Raises OSError that names the file, and the space left on a
    full disk.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if durable:
            sync(temporary)
        os.replace(temporary, path)
        if durable:
            sync(path.parent)
    except OSError as e:
        raise name_failure(e, path) from e
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_atomically(
    path: str | os.PathLike[str], content: str | bytes, *, durable: bool = False, private: bool = False
) -> None:
    """Replace the content of ``path`` (text as UTF-8, line ends as they are); see ``replacing``.

    With ``private`` only this user can read it.
    """
    with replacing(path, durable=durable) as temporary:
        if private:
            temporary.touch(PRIVATE)
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def open_private(path: str | os.PathLike[str], flags: int = 0) -> int:
    """Return a descriptor that appends to ``path``, which only this user can read from now on."""
    descriptor = os.open(path, flags | os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE)
    with contextlib.suppress(OSError):  # another user's
        os.fchmod(descriptor, PRIVATE)
    return descriptor


def sync(path: Path) -> None:
    """Return when the content of a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def name_failure(error: OSError, path: Path) -> OSError:
    """Return ``error`` with the file that could not be written in its message, and the space left on a full disk."""
    space = space_left(path) if error.errno in FULL else ""
    return OSError(error.errno, f"{path}: cannot be written: {error.strerror or error}{space}")


def space_left(path: Path) -> str:
    """Return the free space where ``path`` is, or would be, as words to append to a message."""
    for directory in (path, *path.parents):
        with contextlib.suppress(OSError):
            return f" ({shutil.disk_usage(directory).free >> 20} MiB are free there)"
    return ""
