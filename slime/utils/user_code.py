"""Find the frames of a traceback that are the user's own: the line to look at is the last of them."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

_OURS = str(Path(__file__).resolve().parents[1]) + "/"
_INSTALLED = ("/site-packages/", "/dist-packages/")
_STDLIB = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line \d+, in .*$')


def is_users(filename: str) -> bool:
    """Return True if a source file is neither slime's nor of an installed package."""
    elsewhere = any(part in filename for part in _INSTALLED) or filename.startswith((*_STDLIB, _OURS, "<"))
    return not elsewhere


def root_cause(error: BaseException) -> BaseException:
    """Return the exception that ``error`` was raised from, or in the handling of, first of all."""
    return _chain(error)[-1]


def _chain(error: BaseException) -> list[BaseException]:
    """``error``, what it was raised from, and so on."""
    chain = [error]
    while (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = cause
        chain.append(error)
    return chain


def users_line(error: BaseException) -> str | None:
    """Return ``file:line: source`` of the last line of the user's code that ``error`` came through; None without.

    That is a line of the first exception of the chain that has one: those of a library may come before.
    """
    root = root_cause(error)
    if isinstance(root, SyntaxError) and root.filename:
        return f"{root.filename}:{root.lineno}: {(root.text or '').strip()}"
    for one in reversed(_chain(error)):
        frames = [frame for frame in traceback.extract_tb(one.__traceback__) if is_users(frame.filename)]
        if frames:
            return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"
    return None


def users_traceback(error: BaseException) -> str:
    """Return the frames of the user's code that ``error`` came through, all of them where there is none."""
    text = "".join(traceback.format_exception(error))
    return "\n".join(users_frames(text)) or text.rstrip()


def users_frames(text: str) -> list[str]:
    """Return the lines of a printed traceback that are about the user's code, in order."""
    kept: list[str] = []
    mine = False
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if frame is not None:
            mine = is_users(frame["file"])
        elif not line.startswith("    "):
            mine = False
        if mine:
            kept.append(line)
    return kept
