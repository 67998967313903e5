"""Weight versions as directories: their names, their checksums, and copies of them on the hosts of engines.

``<directory>/weight_v000012`` is a Hugging Face checkpoint that was complete when it got this name. No torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import xxhash

from slime.utils.atomic_file import name_failure, sync

CHECKSUMS = "checksums.json"
BeforeRead = Callable[[str, int], object] | None
_PREFIX = "weight_v"
# A version, the directory that it is written to first, and what the export makes beside that.
_NAME = re.compile(r"weight_v\d{6,}|\.{1,2}weight_v\d{6,}\.staging(\.partial|\.old)?")
_CHUNK = 8 << 20


class CorruptFileError(RuntimeError):
    """A file of weights that does not have the content it was written with."""


def version_dir(root: str | Path, version: int) -> Path:
    """Return the directory of ``version`` below ``root``."""
    return Path(root) / f"{_PREFIX}{version:06d}"


def staging_dir(directory: Path) -> Path:
    """Return where a version is written before it gets its name."""
    return directory.with_name(f".{directory.name}.staging")


def versions(root: str | Path) -> list[Path]:
    """Return the directories of versions below ``root``, of those that were never completed too."""
    found = (path for path in sorted(Path(root).glob("*")) if _NAME.fullmatch(path.name))
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def clear(root: str | Path, *, but: Collection[Path] = ()) -> None:
    """Remove every version below ``root``, and those that were never completed, except ``but``."""
    for path in versions(root):
        if path not in but:
            shutil.rmtree(path)


def write_checksums(directory: Path, digests: dict[str, str]) -> None:
    """Write the xxh3-128 of every file of ``directory`` (name -> hex digits) beside them."""
    (directory / CHECKSUMS).write_text(json.dumps(dict(sorted(digests.items())), indent=1) + "\n")


def read(path: Path) -> str:
    """Return the text of a file of a version; raises FileNotFoundError saying that this host does not see it."""
    try:
        return path.read_text()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is not there on this host: --update-weight-disk-dir must be a directory that trainers and engine "
            "hosts share"
        ) from None


def pull(source: str | Path, local_root: str | Path, before_read: BeforeRead = None) -> Path:
    """Copy the version ``source`` to ``local_root`` on this host, verified; return the copy. Older ones are removed.

    Several engines of a host may ask at once: the first one copies, the others wait and take what it has. Each calls
    ``before_read(directory of all versions, number)`` first. Raises FileNotFoundError when this host does not see
    ``source``, CorruptFileError naming the file that differs from its checksum, OSError naming the file and the space
    left on a full disk.
    """
    source, local_root = Path(source), Path(local_root)
    target = local_root / source.name
    with reading(source, local_root, before_read):
        listed = read(source / CHECKSUMS)
        copied = target / CHECKSUMS  # written last
        if not copied.is_file() or copied.read_text() != listed:
            copy_listed(source, target)
            copied.write_text(listed)
        clear(local_root, but=[target])
    return target


@contextlib.contextmanager
def reading(source: Path, local_root: Path, before_read: BeforeRead) -> Iterator[None]:
    """Hold the lock of ``local_root``, and call ``before_read`` first; see ``pull``."""
    local_root.mkdir(parents=True, exist_ok=True)
    with _only_one(local_root / ".lock"):
        if before_read is not None:
            before_read(str(source.parent), int(source.name.removeprefix(_PREFIX)))
        yield


def copy_listed(source: Path, target: Path) -> None:
    """Replace ``target`` by the files of the version ``source``, but for their checksums, which they must have."""
    digests: dict[str, str] = json.loads(read(source / CHECKSUMS))
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for name, expected in digests.items():
        try:
            found = _copy_file(source / name, target / name)
        except OSError as e:
            raise name_failure(e, target / name) from e
        if found != expected:
            raise CorruptFileError(
                f"{source / name} has xxh3-128 {found}, but was written with {expected}: the file system changed it on "
                "its way, or another process writes to --update-weight-disk-dir"
            )


def _copy_file(source: Path, target: Path) -> str:
    """Copy and return the xxh3-128 of what was copied."""
    summed = xxhash.xxh3_128()
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
    """Give a complete version its name, for good."""
    shutil.rmtree(final, ignore_errors=True)
    os.replace(staging, final)
    sync(final.parent)
