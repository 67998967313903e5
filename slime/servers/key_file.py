"""The key of the rollout buffer and of the gateways: of the environment, else one that this user's processes share."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from slime.servers.auth import is_loopback

KEY_VARIABLE = "SLIME_ROLLOUT_BUFFER_KEY"
_NAME = "key"


def shared_key() -> str:
    """Return the key of ``SLIME_ROLLOUT_BUFFER_KEY``, else the one in this user's key file, which is made when missing.

    The file is ``~/.slime/key``, or, where the home directory cannot be written, ``slime-<uid>/key`` in the directory
    of temporary files. Only its user can read it. Raises PermissionError for one that others could have read or
    written.
    """
    given = os.environ.get(KEY_VARIABLE)
    if given:
        return given
    home, temporary = Path.home() / ".slime", Path(tempfile.gettempdir()) / f"slime-{os.getuid()}"
    try:
        return _key_in(home)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as e:
        if isinstance(e, _Exposed) or os.access(home.parent, os.W_OK):
            raise
        return _key_in(temporary)
    except OSError:  # a file system that is read only, or full
        return _key_in(temporary)


def key_for(url: str) -> str | None:
    """Return the key for requests to ``url``: the user's own is for servers of this host and is sent nowhere else."""
    given = os.environ.get(KEY_VARIABLE)
    return given or (shared_key() if is_loopback(urlsplit(url).hostname or "") else None)


class _Exposed(PermissionError):
    """The key may be known to others."""


def _key_in(directory: Path) -> str:
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    _check(directory, stat.S_ISDIR)
    path = directory / _NAME
    if not path.exists():
        _make(path)
    _check(path, stat.S_ISREG)
    key = path.read_text(encoding="ascii").strip()
    if not key:
        raise _Exposed(f"{path} is empty: remove it, and a new key is made")
    return key


def _make(path: Path) -> None:
    """Write a new key, whole or not at all; of several processes that do so at once, the key of one stays."""
    temporary = path.with_name(f".{_NAME}.{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()


def _check(path: Path, is_kind: object) -> None:
    found = path.lstat()
    assert callable(is_kind)
    if not is_kind(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise _Exposed(f"{path} is not this user's alone: remove it, or set {KEY_VARIABLE}")
    if stat.S_ISREG(found.st_mode) and found.st_mode & 0o077:
        raise _Exposed(f"{path} can be read by others (mode {stat.S_IMODE(found.st_mode):o}): remove it")
