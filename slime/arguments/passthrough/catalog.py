"""Argument lists of installed packages, read once per version.

Importing SGLang takes 8 s and Megatron 4 s, so their arguments are read in a helper process and kept as JSON: the
lists of the pinned versions ship with slime, those of other versions and of checkouts are cached under
``$XDG_CACHE_HOME/slime``.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from slime.arguments.errors import ArgumentError
from slime.arguments.passthrough.source import (
    MEGATRON,
    MEGATRON_LM,
    ROUTER,
    SGLANG,
    SOURCES,
    Source,
    checkout,
    identity,
    installed_version,
    unused_core,
)
from slime.utils import atomic_file

__all__ = [
    "MEGATRON",
    "MEGATRON_LM",
    "ROUTER",
    "SGLANG",
    "SOURCES",
    "Source",
    "cache_directory",
    "installed_version",
    "read_installed",
    "records",
    "records_or_reason",
    "shipped_list",
    "version_words",
    "write_atomically",
]

STAND_INS = Path(__file__).parents[2] / "backends" / "sglang_utils" / "cpu_standins"
READER = Path(__file__).with_name("reader.py")
READ_TIMEOUT_S = 300

Records = list[dict[str, Any]]
_kept: dict[str, Records] = {}  # lists of this process that could not be cached


class UnreadableArguments(ArgumentError):
    """The helper process failed; ``reason`` is the last line of what it said."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def records(source: Source) -> Records:
    """The records of the installed version; of the pinned one when the package is not installed here (a head node).

    Raises ``UnreadableArguments``, an ``ArgumentError``, when they cannot be read.
    """
    version = identity(source) or source.pinned
    if version is not None and version == source.pinned:
        return json.loads(shipped_list(source).read_text())
    name = f"{source.package}-{version}-{reader_digest()}.json"
    cached = _cache_file(name)
    found = _read_cached(cached) or _kept.get(name)
    if found is None:
        print(f"slime: reading the arguments of {source.package} {version}, once (seconds)", file=sys.stderr)
        found = read_installed(source)
        if cached is None or not write_atomically(cached, json.dumps(found)):
            _kept[name] = found
    return found


def records_or_reason(source: Source) -> Records | str:
    """The records, or why they cannot be read; the reason is cached too, until something else is installed."""
    cached = _cache_file(f"{source.package}-{identity(source)}-{reader_digest()}.reason.json")
    reason = _read_cached(cached)
    if reason and "reason" in reason[0]:
        return str(reason[0]["reason"])
    try:
        return records(source)
    except UnreadableArguments as error:
        if cached is not None:
            write_atomically(cached, json.dumps([{"reason": error.reason}]))
        return error.reason


def version_words(source: Source) -> str:
    """The version whose flags are offered, for messages."""
    version = identity(source)
    return version if version is not None else f"{source.pinned} (it is not installed here)"


def shipped_list(source: Source) -> Path:
    """Return the path of the records of the pinned version."""
    return Path(__file__).parent / "shipped" / f"{source.package}-{source.pinned}.json"


def cache_directory() -> Path | None:
    """Return the directory of the lists of versions other than the pinned ones; None for a user without a home."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except RuntimeError:
        return None
    return Path(base) / "slime" / "arguments"


def write_atomically(path: Path, text: str) -> bool:
    """Write beside ``path`` and rename; False, and a line on stderr, when it cannot be: that only costs time."""
    try:
        atomic_file.write_atomically(path, text)
    except OSError as error:
        print(f"slime: cannot cache the argument list in {error.strerror}", file=sys.stderr)
        return False
    return True


def reader_digest() -> str:
    """Changes with the reader, whose records an older slime may have cached in another form."""
    return hashlib.sha256(READER.read_bytes()).hexdigest()[:12]


def _cache_file(name: str) -> Path | None:
    directory = cache_directory()
    return None if directory is None else directory / name


def _read_cached(path: Path | None) -> Records | None:
    """The records in ``path``; None when it is not there, or is not what was written (it is then written again)."""
    if path is None:
        return None
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    is_list = isinstance(found, list) and all(isinstance(record, dict) for record in found)
    return found if is_list else None


def read_installed(source: Source) -> Records:
    """Read the arguments of the installed package (seconds). Raises ``UnreadableArguments``."""
    with tempfile.TemporaryDirectory(prefix="slime-arguments-") as directory:
        out = Path(directory) / "records.json"
        command = [sys.executable, "-P", str(READER), source.reader, str(out)]
        try:
            done = subprocess.run(
                command, env=_environment(source), capture_output=True, text=True, timeout=READ_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            reason = f"reading the arguments of {source.package} took more than {READ_TIMEOUT_S} s"
            raise UnreadableArguments(f"{reason}: {' '.join(command)}", reason) from error
        if done.returncode != 0 or not out.is_file():
            raise _failure(source, done.returncode, done.stderr)
        return json.loads(out.read_text())


def has_cuda_device() -> bool:
    """Return True if this machine has an NVIDIA driver, without asking torch."""
    return any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"))


def _environment(source: Source) -> dict[str, str]:
    """The helper's environment: the copy that was found here is the one it imports.

    Without a GPU the stand-ins for SGLang's compiled kernels are on its ``PYTHONPATH``, and on no other process's.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    in_front = [str(STAND_INS)] if source is SGLANG and not has_cuda_device() else []
    found = checkout(source)
    if found is not None:
        in_front.append(str(found.parents[source.module.count(".")]))
    given, unused = env.get("PYTHONPATH", "").split(os.pathsep), unused_core()
    if unused is not None:
        given = [p for p in given if Path(p, "megatron", "core").absolute() != unused.absolute()]
    env["PYTHONPATH"] = os.pathsep.join(p for p in (*in_front, *given) if p)
    return env


def _failure(source: Source, code: int, stderr: str) -> UnreadableArguments:
    words = stderr.strip().splitlines() or ["(nothing)"]
    way_out = f"Install {source.package}=={source.pinned}, or repair" if source.pinned else "Repair"
    return UnreadableArguments(
        f"cannot read the arguments of the installed {source.package} {identity(source) or ''} (exit code {code}). "
        "Its last words:\n" + "\n".join(words[-8:]) + f"\n{way_out} the installation.",
        reason=words[-1].strip(),
    )
