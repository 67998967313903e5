"""Weight versions as directories: their names, their checksums, and copies of them on the hosts of engines.

``<directory>/weight_v000012`` is a Hugging Face checkpoint that was complete when it got this name. No torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from slime.utils.atomic_file import name_failure

CHECKSUMS = "checksums.json"
# A version, the directory that it is written to first, and what the export makes beside that.
_NAME = re.compile(r"weight_v\d{6,}|\.{1,2}weight_v\d{6,}\.staging(\.partial|\.old)?")
_CHUNK = 8 << 20


class CorruptFileError(RuntimeError):
    """A file of weights that does not have the content it was written with."""


def version_dir(root: str | Path, version: int) -> Path:
    """Return the directory of ``version`` below ``root``."""
    return Path(root) / f"weight_v{version:06d}"


def staging_dir(directory: Path) -> Path:
    """Return where a version is written before it gets its name."""
    return directory.with_name(f".{directory.name}.staging")


def clear(root: str | Path, *, but: Path | None = None) -> None:
    """Remove every version below ``root``, and those that were never completed, except ``but``."""
    for path in Path(root).glob("*"):
        if path != but and _NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def digest(path: Path) -> str:
    """Return the sha256 of a file as hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(directory: Path, digests: dict[str, str]) -> None:
    """Write the sha256 of every file of ``directory`` (name -> hex digits) beside them."""
    (directory / CHECKSUMS).write_text(json.dumps(dict(sorted(digests.items())), indent=1) + "\n")


def pull(source: str | Path, local_root: str | Path) -> Path:
    """Copy the version ``source`` to ``local_root`` on this host, verified; return the copy. Older ones are removed.

    Several engines of a host may ask at once: the first one copies, the others wait and take what it has. Raises
    FileNotFoundError when this host does not see ``source``, CorruptFileError naming the file that differs from its
    checksum, OSError naming the file and the space left on a full disk.
    """
    source, local_root = Path(source), Path(local_root)
    try:
        listed = (source / CHECKSUMS).read_text()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{source / CHECKSUMS} is not there on this host: --update-weight-disk-dir must be a directory that "
            "trainers and engine hosts share"
        ) from None
    local_root.mkdir(parents=True, exist_ok=True)
    target = local_root / source.name
    with _only_one(local_root / ".lock"):
        copied = target / CHECKSUMS  # written last
        if not copied.is_file() or copied.read_text() != listed:
            _copy(source, target, json.loads(listed))
            copied.write_text(listed)
        clear(local_root, but=target)
    return target


def _copy(source: Path, target: Path, digests: dict[str, str]) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for name, expected in digests.items():
        try:
            found = _copy_file(source / name, target / name)
        except OSError as e:
            raise name_failure(e, target / name) from e
        if found != expected:
            raise CorruptFileError(
                f"{source / name} has sha256 {found}, but was written with {expected}: the file system changed it on "
                "its way, or another process writes to --update-weight-disk-dir"
            )


def _copy_file(source: Path, target: Path) -> str:
    """Copy and return the sha256 of what was copied."""
    summed = hashlib.sha256()
    with open(source, "rb") as read, open(target, "wb") as write:
        while chunk := read.read(_CHUNK):
            summed.update(chunk)
            write.write(chunk)
    return summed.hexdigest()


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``; it is given up when the process ends, however it ends."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def replace(staging: Path, final: Path) -> None:
    """Give a complete version its name."""
    shutil.rmtree(final, ignore_errors=True)
    os.replace(staging, final)
