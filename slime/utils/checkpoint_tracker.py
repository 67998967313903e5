"""The file that names the last checkpoint of a directory, Megatron-LM's ``latest_checkpointed_iteration.txt``.

A note beside it holds the digest of its content, or of the two that it may have while it is replaced: a damaged tracker
would send a run to another checkpoint, and one that was lost to its beginning. What another program wrote later than
the note is believed: damage keeps the time of a file.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import xxhash

from slime.utils.atomic_file import replacing, write_atomically
from slime.utils.digests import DamagedFile

TRACKER = "latest_checkpointed_iteration.txt"
NOTE = "latest_checkpointed_iteration.digest"
_FORM = re.compile(r"(?:(?:none|[0-9a-f]{32})\n){1,2}")
_NONE = "none"
"""In the note: there may be no tracker yet."""


def write(root: str | Path, text: str) -> None:
    """Let the tracker of ``root`` hold ``text``, durably. Killed at any moment it is one that is accepted.

    It is never later than its note, also between the two: only what others write is.
    """
    tracker, note = Path(root) / TRACKER, Path(root) / NOTE
    before = _of(tracker.read_bytes()) if tracker.is_file() else _NONE
    write_atomically(note, f"{before}\n{_of(text.encode())}\n", durable=True)
    with replacing(tracker, durable=True) as temporary:
        temporary.write_bytes(text.encode())
        with contextlib.suppress(OSError):  # a file system that sets no times
            os.utime(temporary, ns=(note.stat().st_mtime_ns,) * 2)
    write_atomically(note, f"{_of(text.encode())}\n", durable=True)


def read(root: str | Path) -> int | None:
    """Return the tracked iteration (None for Megatron-LM's ``release``). Raises DamagedFile for anything else."""
    path = Path(root) / TRACKER
    content = path.read_bytes()
    noted = _noted(root)
    if noted and _of(content) not in noted and path.stat().st_mtime_ns <= (Path(root) / NOTE).stat().st_mtime_ns:
        raise DamagedFile(
            f"{path} holds {content[:40]!r}, which is not what the last save wrote by {NOTE}. Take an iteration that "
            f"is there ({_iterations(root)}) with --ckpt-step; if you changed the file, remove {Path(root) / NOTE}"
        )
    text = content.decode(errors="replace").strip()
    if text == "release":
        return None
    try:
        return int(text)
    except ValueError:
        raise DamagedFile(f"{path} should hold an iteration number or 'release', but holds {text[:40]!r}") from None


def check_absence(root: str | Path) -> None:
    """Raise DamagedFile when ``root`` has no tracker and once had one."""
    path = Path(root) / TRACKER
    noted = _noted(root)
    if not path.is_file() and noted and _NONE not in noted:
        raise DamagedFile(
            f"{path} is gone: a checkpoint was saved there. Write the iteration to resume from to it "
            f"({_iterations(root)}), and remove {Path(root) / NOTE}; to start afresh, remove that alone"
        )


def _noted(root: str | Path) -> list[str]:
    try:
        text = (Path(root) / NOTE).read_text(errors="replace")
    except FileNotFoundError:
        return []
    return text.split() if _FORM.fullmatch(text) else ["damaged"]


def _iterations(root: str | Path) -> str:
    return ", ".join(sorted(path.name for path in Path(root).glob("iter_*") if path.is_dir())) or "none"


def _of(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)
