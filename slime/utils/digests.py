"""Digests written with what a run saves, and compared when it is loaded: xxh3-128 as hex digits.

Of a directory they are in its ``digests.json``; a separate JSON object carries its digest within (``seal``). What has
none was written by slime <= 0.3.1 or another program, and is not compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

FILE = "digests.json"
_CHUNK = 8 << 20
_HEAD = b'{"sealed":1'
_TAIL = re.compile(rb',"digest":"([0-9a-f]{32})"\}\Z')


class DamagedFile(ValueError):
    """A file that is not what was written, or not there."""


def digest(path: Path) -> str:
    """Return the xxh3-128 of a file."""
    summed = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            summed.update(chunk)
    return summed.hexdigest()


@dataclass(frozen=True)
class Listed:
    """``files``: path below the directory -> digest. ``beside``: files elsewhere, with separate digests.

    ``of``: the name of the directory, but for an ending.
    """

    of: str
    files: dict[str, str]
    beside: list[str]


def write(directory: Path, files: Mapping[str, str], beside: Iterable[str] = ()) -> None:
    """Write the digests of the files of ``directory``; see ``Listed``."""
    listed = Listed(_name(directory), dict(sorted(files.items())), list(beside))
    (directory / FILE).write_bytes(seal(json.dumps(asdict(listed)).encode(), "digests"))


def read(directory: Path) -> Listed | None:
    """Return what ``write`` wrote; None where there is nothing.

    Raises DamagedFile, also for those of another iteration: only to something else (``release``) may it be renamed.
    """
    path = directory / FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if (plain := unseal(content, "digests", path)) == content:
        raise DamagedFile(f"{path} is damaged: it is no list of digests")
    found = Listed(**json.loads(plain))
    if found.of != _name(directory) and directory.name.startswith("iter_"):
        raise DamagedFile(f"{path} is of {found.of}")
    return found


def _name(directory: Path) -> str:
    return directory.name.partition(".")[0]


def check(directory: Path, digests: Mapping[str, str], names: Iterable[str]) -> None:
    """Compare the files ``names`` of ``directory``. Raises DamagedFile, naming the first that differs."""
    for name in names:
        path = directory / name
        try:
            found = digest(path)
        except OSError as e:
            raise DamagedFile(f"{path} cannot be read: {e.strerror or e}") from e
        if found != digests[name]:
            raise DamagedFile(
                f"{path} is damaged or cut off: it has xxh3-128 {found} ({path.stat().st_size} bytes), and was written "
                f"with {digests[name]}"
            )


def seal(content: bytes, label: str) -> bytes:
    """Return ``content``, a JSON object on one line, with its digest, of it as ``label`` alone, within."""
    inner = content[1:-1]
    return b'%s%s%s,"digest":"%s"}' % (_HEAD, b"," if inner else b"", inner, _of(content, label))


def unseal(content: bytes, label: str, path: Path) -> bytes:
    """Return what was sealed; what was never sealed as it is. Raises DamagedFile, naming ``path``."""
    tail = _TAIL.search(content[-64:])
    plain = content.strip()  # editors and jq end a file with a newline
    if not plain.startswith(_HEAD) and tail is None and plain.startswith(b"{") and plain.endswith(b"}"):
        return content
    inner = content[len(_HEAD) : -len(tail[0])] if tail else b""
    found = b"{%s}" % inner[1:]
    whole = content.startswith(_HEAD) and tail is not None and inner[:1] in (b"", b",")
    if not whole or tail is None or tail[1] != _of(found, label):
        raise DamagedFile(f"{path} is damaged or cut off, or of something else than {label}")
    return found


def _of(content: bytes, label: str) -> bytes:
    return xxhash.xxh3_128_hexdigest(label.encode() + b"\n" + content).encode()
